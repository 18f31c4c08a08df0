"""Only the type of names makes and reads them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.state.names import StateName, stems

PACKAGE = Path(__file__).parents[2] / "checkflow"
ROOMS = ("state", "checkpointing", "runtime", "trace")
CUTS = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix"}
# Versions, objects of a bucket, and ways through code.
OTHERS = {
    "runtime/cudart.py", "checkpointing/behind.py", "checkpointing/listing.py", "trace/unlisted.py",
    "trace/reachable.py",
}  # fmt: skip


def naming_of(path: Path) -> Iterator[int]:
    """Lines of a file that join or cut a text as if it was a name of state."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            pairs = zip(node.values, node.values[1:], strict=False)
            if any(
                isinstance(left, ast.FormattedValue)
                and isinstance(right, ast.Constant)
                and str(right.value).startswith("/")
                for left, right in pairs
            ):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CUTS:
            given = [found.value for found in node.args if isinstance(found, ast.Constant)]
            if any(found in ("/", ".", "extra.", "model", "optimizer", "param_groups.") for found in given):
                yield node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_names_of_state_are_joined_and_cut_in_one_place(room: str) -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in (PACKAGE / room).rglob("*.py")}
    assert files
    found = {name for name, path in files.items() if name not in OTHERS and list(naming_of(path))}
    assert found == ({"state/names.py"} if room == "state" else set())


@pytest.mark.parametrize("text", ["model/a.weight", "model.1/a", "optimizer.0/model.1/a.weight.exp_avg", "extra.x/t"])
def test_a_name_is_its_text(text: str) -> None:
    """As a key and in files it is what it is in messages."""
    name = StateName(text)
    assert StateName.of(name.holder, name.path) == text
    assert {text: 1}[name] == 1 and f"{name}" == text
    assert name.is_optimizers == text.startswith("optimizer") and name.is_extra == text.startswith("extra")


def test_slots_of_parameters_alike_in_name_are_told_apart_by_their_models() -> None:
    one, other, third = map(StateName, ("model.0/a.weight", "model.1/a.weight", "model.1/b"))
    by_parameter = stems("optimizer", [one, other, third, third])
    assert by_parameter == {
        one: "optimizer/model.0/a.weight",
        other: "optimizer/model.1/a.weight",
        third: "optimizer/b",
    }
    assert by_parameter[other].inside("exp_avg") == "optimizer/model.1/a.weight.exp_avg"
