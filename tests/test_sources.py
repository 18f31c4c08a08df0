"""How a model file is loaded, and how --set's text becomes arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkflow import sources
from checkflow.errors import ModelFileError

MODEL = """
from __future__ import annotations
import torch
def training(batch_size: int = 2, lr: float = 1e-3, bias: bool = True, extra=None) -> checkflow.Training:
    import checkflow
    import {sibling}
    made = (batch_size, lr, bias, extra, {sibling}.WIDTH)
    model = torch.nn.Linear(2, 2)
    model.made = made
    return checkflow.Training(model, torch.optim.SGD(model.parameters()), lambda: None)
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., object]:
    """What the factory of a model file, whose names stand only inside it, is called with."""
    (tmp_path / f"sibling_of_{tmp_path.name}.py").write_text("WIDTH = 7\n")
    (tmp_path / "model.py").write_text(MODEL.format(sibling=f"sibling_of_{tmp_path.name}"))

    def make(**settings: str) -> object:
        return sources.load(str(tmp_path / "model.py"), settings).factory().models[0].made

    return make


def test_a_factory_imports_its_neighbours_when_it_runs(made: Callable[..., object]) -> None:
    """As under `python model.py`, also where annotations name what only the factory imports."""
    assert made() == (2, 1e-3, True, None, 7)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": "3e-4"}, (2, 3e-4, True, None, 7)),
        ({"lr": "1"}, (2, 1.0, True, None, 7)),
        ({"batch_size": "010"}, (10, 1e-3, True, None, 7)),
        ({"bias": "false"}, (2, 1e-3, False, None, 7)),
        ({"extra": "[1, a]"}, (2, 1e-3, True, [1, "a"], 7)),
    ],
)
def test_arguments_are_converted(settings: dict[str, str], expected: object, made: Callable[..., object]) -> None:
    """Numbers as Python reads them, anything that is not annotated as YAML."""
    assert made(**settings) == expected


def test_a_value_error_on_import_is_told_as_such(tmp_path: Path) -> None:
    """It is the file's own, with its line, and does not count as a file that is no Python."""
    path = tmp_path / "model.py"
    path.write_text("x = 1\nint('seven')\n")
    with pytest.raises(ModelFileError, match=r"model\.py:2: importing it raised ValueError"):
        sources.load(str(path), {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a\0b", r"model\.py: is not Python source"),
        (
            b"x = 1\nfrom .other import y\n",
            r"model\.py:2: .* relative import .*; import what lies beside it by its name",
        ),
    ],
)
def test_what_is_no_module_of_its_own_is_told(text: bytes, why: str, tmp_path: Path) -> None:
    """Of a package, or no Python at all."""
    path = tmp_path / "model.py"
    path.write_bytes(text)
    with pytest.raises(ModelFileError, match=why):
        sources.load(str(path), {})


def test_a_name_that_is_not_text_is_written_so_that_it_is(tmp_path: Path) -> None:
    """Files are UTF-8; what a directory says need not be."""
    path = tmp_path / os.fsdecode(b"bad\xff.py")
    path.write_text("def training():\n    pass\n")
    assert sources.load(str(path), {}).name == r"bad\xff.py"
