"""What a model's file does to its process is nothing to the models after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkflow
from checkflow.cli import run
from checkflow.errors import InputError, ModelFileError
from checkflow.sweep.isolated import isolated
from checkflow.sweep.jobs import Broken, Trace, replies

NET = """
import torch
from torch import nn
import checkflow
{}
def training():
    model = nn.Linear(8, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    def iteration():
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkflow.Training(model, optimizer, iteration)
"""


def net(path: Path, first: str = "", width: str = "WIDTH = 16") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(NET.format(f"{first}\n{width}"))
    return path


def state_bytes(answer: str) -> dict[str, int]:
    return {Path(row["model"]).name: row["state_bytes"] for row in json.loads(answer)["rows"]}


@pytest.mark.parametrize("first", ["torch.set_default_dtype(torch.float64)", "import os; os.chdir('/')"])
def test_a_sweep_answers_for_each_model_as_if_it_were_alone(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In whichever order, and in one worker: its files are found where they were when it began."""
    monkeypatch.chdir(tmp_path)
    net(tmp_path / "other.py", first)
    net(tmp_path / "net.py")
    assert run(["sweep", "net.py", "--bandwidth", "5GB/s", "--json"]) == 0
    alone = state_bytes(capsys.readouterr().out)
    assert run(["sweep", "other.py", "net.py", "--bandwidth", "5GB/s", "--jobs", "1", "--json"]) == 0
    assert state_bytes(capsys.readouterr().out)["net.py"] == alone["net.py"]


def test_a_file_that_ends_its_process_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When it is looked at first, and when it only does so then."""
    path = net(tmp_path / "net.py", "import os; os._exit(3)")
    assert run(["sweep", str(path), "--bandwidth", "5GB/s"]) == 2
    assert f"{path}: ended the process that it ran in (exit code 3); correct the file" in capsys.readouterr().err
    (broken,) = replies(Trace(str(path), ()))
    assert isinstance(broken, Broken) and "exit code 3" in broken.message


def test_an_error_of_the_inside_is_one_of_the_outside() -> None:
    def fails() -> None:
        raise InputError("x: is wrong")

    with pytest.raises(InputError, match=r"^x: is wrong$"):
        isolated(fails, "x")
    with pytest.raises(ModelFileError, match="exit code 1"):
        isolated(lambda: 1 // 0, "x")


def test_compile_takes_each_model_with_the_files_beside_it(tmp_path: Path) -> None:
    """Though files beside two models have one name."""
    found = {}
    for folder, width in (("a", 16), ("b", 32)):
        net(tmp_path / folder / "net.py", "from beside_the_model import WIDTH", "")
        (tmp_path / folder / "beside_the_model.py").write_text(f"WIDTH = {width}\n")
        found[folder] = checkflow.compile(tmp_path / folder / "net.py", bandwidth="5GB/s").state_bytes
    assert found["b"] == 2 * found["a"]
