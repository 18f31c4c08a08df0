"""Hugging Face's Trainer, killed anywhere and resumed, ends as one that was never interrupted, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'checkflow[transformers]'")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent
BATCHES = 6  # micro-batches of two items in a step

# Where it is killed, and the step that it resumes from. 7 steps are an epoch; each fifth is evaluated.
KILLS = {
    "step:10": 9,  # as step 11 begins: callbacks run in their order, and this one is not the last
    "step:7": 6,  # at the border of epochs, as the next one begins
    "epoch:7": 6,  # at the border, before the epoch's end is reached by all
    "evaluate:10": 9,
    "substep:9": 9,
    "raise:9": 9,
}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings, in one process that forks each: transformers takes seconds to import."""
    root = tmp_path_factory.mktemp("lives")
    command = [sys.executable, str(HERE / "trainings.py"), str(root), "plain:0", "never:0", *KILLS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (root / "stderr").write_text(done.stderr)
    return root


def told(lives: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((lives / case / "final.json").read_text())
    return found


def order(lives: Path, case: str) -> dict[int, list[str]]:
    """The batches of each step, as they were trained on when it was done last."""
    found: dict[int, list[str]] = {}
    last = 0
    for line in (lives / case / "order").read_text().splitlines():
        step, batch = line.split(" ", 1)
        if int(step) != last:
            found[int(step)] = []
        last = int(step)
        found[last].append(batch)
    return found


def test_checkpoints_change_nothing(lives: Path) -> None:
    assert told(lives, "never:0") == told(lives, "plain:0")
    assert order(lives, "never:0") == order(lives, "plain:0")


@pytest.mark.parametrize("case", KILLS)
def test_killed_and_resumed_it_ends_the_same(lives: Path, case: str) -> None:
    """Weights, optimizer, scheduler, generators, log history, Trainer's state, a callback's, and the order of the data."""
    killed, resumed = map(int, (lives / case / "statuses").read_text().split())
    assert (killed, resumed) == (1 if case.startswith("raise") else -9, 0)
    assert told(lives, case)["final"] == told(lives, "plain:0")["final"]
    assert {k: v[-BATCHES:] for k, v in order(lives, case).items()} == order(lives, "plain:0")
