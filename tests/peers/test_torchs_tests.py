"""The runner of torch's own tests: what passes with torch's classes and fails with ours is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import benchmarks_path  # noqa: F401 (where the next is)
from torching.outcomes import run

RUNNER = Path(__file__).parent.parent.parent / "benchmarks" / "torchs_tests.py"
TESTS = """
import multiprocessing, tempfile, unittest, warnings

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save


def name_elsewhere(queue):
    queue.put(FileSystemWriter.__name__)


class Small(unittest.TestCase):
    def test_saves(self):
        with tempfile.TemporaryDirectory() as path:
            save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(path, thread_count=2, overwrite=True))
            state = {"a": torch.zeros(2)}
            load(state, checkpoint_id=path)
            load(state, storage_reader=FileSystemReader(path))
            self.assertEqual(state["a"].tolist(), [1, 1])

    def test_is_torchs_in_each_process(self):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=name_elsewhere, args=(queue,))
        process.start()
        self.assertEqual(queue.get(), "FileSystemWriter")

    def test_fails(self):
        raise KeyError("always")

    @unittest.skip("of no use")
    def test_skips(self):
        pass
"""


def checkout(folder: Path) -> None:
    file = folder / "test" / "distributed" / "checkpoint" / "test_small.py"
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)


def test_ours_are_in_the_place_of_torchs(tmp_path: Path) -> None:
    """In each process, by any of their names; in torch's turn they are not. What is worse with ours is told."""
    checkout(tmp_path)
    (tmp_path / "version.txt").write_text("2.13.0\n")
    report = tmp_path / "report.json"
    process = subprocess.run(
        [sys.executable, RUNNER, tmp_path, "--json", report], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 1, process.stderr
    assert "tests of 2.13.0" in process.stdout
    assert "| test_small | 3 | 1 | 2 | 1 | 2, 1 |" in process.stdout
    assert "* test_small, Small.test_is_torchs_in_each_process: AssertionError" in process.stdout
    assert "* test_small, Small.test_fails: fails with torch's own classes, too: KeyError 'always'" in process.stdout
    (row,) = json.loads(report.read_text())["rows"]
    assert row["torchs"]["tests"] == {
        "Small.test_saves": "passed",
        "Small.test_is_torchs_in_each_process": "passed",
        "Small.test_fails": "KeyError 'always'",
        "Small.test_skips": "skipped",
    }
    assert (row["torchs"]["readers"], row["torchs"]["writers"]) == (0, 0)
    differs = {name: became for name, became in row["ours"]["tests"].items() if became != row["torchs"]["tests"][name]}
    assert differs == {"Small.test_is_torchs_in_each_process": "AssertionError 'Writer' != 'FileSystemWriter'"}


def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "test_long.py"
    file.write_text("import time\n\ndef test_long():\n    time.sleep(100)\n")
    found = run(file, "torchs", 5)
    assert (found.tests, found.wrong) == ({}, "did not end within 5 s")


def test_no_checkout(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, RUNNER, tmp_path], capture_output=True, text=True, timeout=300)
    assert process.returncode == 2
    assert "has no tests in test/distributed/checkpoint; give a checkout of pytorch's source" in process.stderr
