"""A graph or schedule that was edited and sealed again: numbers that nothing has are one line, no internal error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE
from checkflow.jsonfile import digest_of

ROOT = Path(__file__).parents[2]
GRAPH, SCHEDULE = ROOT / "graphs" / "alexnet-1.json", ROOT / "schedules" / "alexnet-1.json"
UNSEALED = {GRAPH: {"format", "version", "digest"}, SCHEDULE: {"digest"}}
LARGE = 10**400


def numbers_of(document: object, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where whole numbers stand, in the first row of each table alone."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from numbers_of(value, (*where, key))
    elif isinstance(document, list):
        for number, value in enumerate(document[:1]):
            yield from numbers_of(value, (*where, number))
    elif type(document) is int and where != ("version",):
        yield where


def sealed(source: Path, where: tuple[str | int, ...], value: object) -> Path:
    """The file with one number changed, and its digest again that of its content."""
    document = copy.deepcopy(json.loads(source.read_text()))
    place: Any = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    document["digest"] = digest_of({key: each for key, each in document.items() if key not in UNSEALED[source]})
    path = Path("edited.json")
    path.write_text(json.dumps(document))
    return path


CASES = [(source, where) for source in (GRAPH, SCHEDULE) for where in numbers_of(json.loads(source.read_text()))]


@pytest.mark.parametrize(
    ("source", "where"),
    CASES,
    ids=lambda part: part.parent.name if isinstance(part, Path) else ".".join(map(str, part)),
)
def test_a_number_beyond_all_bounds_names_its_field(
    source: Path,
    where: tuple[str | int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = sealed(source, where, LARGE)
    assert run(["inspect", str(path)]) == EXIT_BAD_INPUT
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert (
        captured.err.startswith(f"checkflow: {path}: field {'.'.join(map(str, where))}: ") and len(captured.err) < 200
    )


def test_a_bound_of_nothing_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a certificate says is repeated, and nothing is divided by it."""
    monkeypatch.chdir(tmp_path)
    assert run(["inspect", str(sealed(SCHEDULE, ("certificate", "lower_bound_bytes"), 0))]) == EXIT_DONE


def test_a_graph_that_no_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["inspect", str(sealed(GRAPH, ("tensors", 0, "bytes"), 2**63 - 1))]) == EXIT_BAD_INPUT
    assert f"field tensors: have more than {2**62} bytes at once" in capfd.readouterr().err


def test_a_graph_of_empty_storages_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chart is of nothing."""
    monkeypatch.chdir(tmp_path)
    tensors = [row | {"bytes": 0} for row in json.loads(GRAPH.read_text())["tensors"]]
    assert run(["compile", str(sealed(GRAPH, ("tensors",), tensors)), "-o", "s.json"]) == EXIT_DONE


@pytest.mark.parametrize("formulation", ["direct", "compact"])
def test_the_fastest_link_and_the_slowest_operator_compile(
    formulation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step moves more bytes than 64 bits count."""
    monkeypatch.chdir(tmp_path)
    path = sealed(GRAPH, ("ops", 0, "time_ns"), 10**24)
    arguments = ["--bandwidth", "1e24B/s", "--formulation", formulation, "--interval", "1", "-o", "s.json"]
    assert run(["compile", str(path), *arguments]) == EXIT_DONE


def test_figures_too_small_for_a_time_name_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No graph could hold what its operators would take."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "checkflow" / "hardware" / "h100.yaml").read_text().replace("name: h100", "name: slow")
    Path("slow.yaml").write_text(text)
    path = sealed(GRAPH, ("ops", 0, "flops"), 10**24)
    Path("slow.yaml").write_text(
        "\n".join("  float32: 1" if line.strip().startswith("float32:") else line for line in text.splitlines())
    )
    assert run(["trace", str(path), "--device", "slow.yaml", "-o", "t.json"]) == EXIT_BAD_INPUT
    assert "correct this profile's figures" in capfd.readouterr().err
