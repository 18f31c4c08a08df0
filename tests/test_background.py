"""What is left of processes in the background."""

from __future__ import annotations

import ast
import os
import sys
import threading
from pathlib import Path

import pytest

import checkflow
from checkflow.background import python_path, remove_written


def test_a_folder_that_is_written_to_is_removed(tmp_path: Path) -> None:
    """Each time, whatever the writer is at; it finds none then."""
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        began = threading.Event()

        def write(folder: Path = folder, began: threading.Event = began) -> None:
            try:
                for count in range(10**6):
                    (folder / f"{count % 20}.part").write_bytes(b"")
                    (folder / f"{count % 20}.part").replace(folder / f"{count % 20}")
                    began.set()
            except FileNotFoundError:
                return

        writer = threading.Thread(target=write)
        writer.start()
        began.wait()
        remove_written(folder)
        writer.join()
        assert not folder.exists()


def test_what_is_not_there_is_removed(tmp_path: Path) -> None:
    remove_written(tmp_path / "none")


def test_processes_find_modules_where_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may put anything into sys.path; Python looks at nothing there but strings."""
    monkeypatch.setattr(sys, "path", ["/one", Path("/nowhere"), "", None, "/two"])
    assert python_path() == "/one:/two"


def test_that_is_said_in_one_place() -> None:
    """Each process is started with it."""
    files = Path(checkflow.__file__).parent.rglob("*.py")
    assert [path.name for path in files if "pathsep.join" in path.read_text()] == ["background.py"]
    assert os.pathsep == ":"


def test_a_temporary_folder_that_cannot_be_removed_hides_no_error() -> None:
    """What ended the block is what is told, wherever the package makes one; its examples are for reading."""
    package = Path(checkflow.__file__).parent
    files = [path for path in package.rglob("*.py") if not path.is_relative_to(package / "examples")]
    calls = [
        (path.name, node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tempfile.TemporaryDirectory")
    ]
    assert len(calls) > 4
    assert [name for name, call in calls if all(each.arg != "ignore_cleanup_errors" for each in call.keywords)] == []
