"""Iterations that make no update: a schedule is learned of one that does, and nobody is told that there was none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_attach_learning import Loop, attached, until_learned

from checkflow.learning import learner


class Gathering(Loop):
    """Iterations that gather what later ones train on; `updates` says which make an update."""

    def __init__(self, updates: Callable[[int], bool]) -> None:
        super().__init__()
        self.updates = updates

    def iterate(self, number: int) -> None:
        if self.updates(number):
            super().iterate(number)
        else:
            with torch.no_grad():
                self.model(torch.zeros(self.rows, 6))


@pytest.mark.parametrize(
    "updates",
    [lambda number: number >= 12, lambda number: number >= 70, lambda number: number % 3 == 2],
    ids=["from the twelfth on", "after it was tried once", "each third"],
)
def test_learning_waits_for_an_iteration_that_makes_an_update(updates: Callable[[int], bool], tmp_path: Path) -> None:
    loop, told = Gathering(updates), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:
        until_learned(ckpt, loop.iterate)
    assert not any("no schedule was learned" in line for line in told), told


def test_where_none_is_found_that_is_told_in_words_for_a_training_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its optimizer has no gradients to make an update of."""
    monkeypatch.setattr(learner, "_UPDATELESS", 3)
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:
        for _ in itertools.takewhile(lambda _: ckpt.learning != "knowing", range(60)):
            loop.optimizer.step()  # without gradients
            ckpt.step()
    (said,) = [line for line in told if "no schedule was learned" in line]
    assert "3 iterations were recorded, and none of them wrote a parameter" in said and "factory" not in said
