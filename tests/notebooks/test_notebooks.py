"""Every notebook runs from a clean kernel and says what is committed; and the check that tells so has teeth."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"
SMALL = {
    "cells": [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": "code-00",
            "metadata": {"tags": ["deterministic"]},
            "outputs": [],
            "source": ["print('two is', 1 + 1)"],
        }
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}
FAULTS = {
    "a cell that raises": ("1 + 1", "1 / 0", "ZeroDivisionError"),
    "code changed after its outputs": ("1 + 1", "2 * 1", "its code was changed after it was executed"),
    "another output": ("two is 2", "two is 3", "now gives 'two is 2"),
    "no outputs": ('"execution_count": 1', '"execution_count": null', "not executed in order"),
    "a folder of this machine": ("two is 2", f"two is {tempfile.gettempdir()}/x", "a folder of this machine"),
    "a large output": ("two is 2", "two is 2" + 500_000 * ".", "keep it under"),
}


def _execute(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, NOTEBOOKS / "execute.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small notebook as execute.py wrote it."""
    path = tmp_path_factory.mktemp("notebook") / "small.ipynb"
    path.write_text(json.dumps(SMALL))
    done = _execute(path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path.read_text()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_a_clean_kernel(path: Path) -> None:
    """No cell fails, outputs are committed and of this code, and those that cannot differ do not."""
    done = _execute("--check", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_executing_again_changes_nothing(executed: str, tmp_path: Path) -> None:
    """Where outputs are the same, so is every byte of the file; and the check accepts it."""
    path = tmp_path / "small.ipynb"
    path.write_text(executed)
    assert _execute(path).returncode == 0
    assert path.read_text() == executed
    assert _execute("--check", path).returncode == 0
    assert path.read_text() == executed


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees(fault: str, executed: str, tmp_path: Path) -> None:
    """Each fault makes the check fail, and is named."""
    before, after, said = FAULTS[fault]
    assert before in executed
    path = tmp_path / "small.ipynb"
    path.write_text(executed.replace(before, after))
    done = _execute("--check", path)
    assert done.returncode == 1
    assert said in done.stdout
