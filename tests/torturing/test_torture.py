"""The short torture, of a fixed seed: nothing is restored that is not the uninterrupted run's, and nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
UNUSUAL = {"syscalls"}  # kinds that not every machine can run; the report says why


def tortured(tmp_path: Path, program: Path, *arguments: str) -> tuple[int, dict[str, Any], list[tuple[object, ...]]]:
    """Exit code, report, and what went wrong."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(program), *arguments, "--directory", str(tmp_path), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    wrong: list[tuple[object, ...]] = [
        (found["seed"], run["kind"], run["number"], outcome["what"], outcome["setting"], outcome["wrong"])
        for run in found["runs"]
        for outcome in run["outcomes"]
        if outcome["wrong"]
    ]
    return done.returncode, found, wrong


def test_a_short_torture_finds_nothing_wrong(tmp_path: Path) -> None:
    """Each kind has run; of each outcome that went wrong, what and why. Nightly: the whole of it, of a new seed."""
    length = [] if NIGHTLY else ["--short", "--seed", "0"]
    code, found, wrong = tortured(tmp_path, BENCHMARKS / "torture.py", *length)
    assert not wrong
    assert code == 0
    assert set(found["skipped"]) <= UNUSUAL
    ran = {run["kind"] for run in found["runs"]}
    assert ran | set(found["skipped"]) >= {"calls", "corruptions", "forks", "hostile", "kills", "signals", "soak"}
    compared = [outcome for run in found["runs"] for outcome in run["outcomes"] if outcome["identical"] is not None]
    assert len(compared) > 50
    assert all(outcome["identical"] for outcome in compared)


def test_a_checkpoint_that_lacks_something_is_found_out(tmp_path: Path) -> None:
    """Where restoring forgets the scheduler, the torture says so."""
    program = Path(__file__).with_name("sabotaged.py")
    code, _, wrong = tortured(tmp_path, program, "--kinds", "kills", "--runs", "1", "--seed", "0")
    assert code == 1
    assert any("differs from the uninterrupted run's" in str(each[-1]) for each in wrong)
