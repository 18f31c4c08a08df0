"""What `step(loss=...)` is given is in each checkpoint, and after a resume it is told whether it goes on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_attach import compiled, small
from test_narrator import attached

import checkflow
from checkflow.schedule import Schedule
from checkflow.state.host.losses import KEPT, Losses
from checkflow.state.host.record import parse_record
from checkflow.store.format.reader import load_newest

BEFORE = [3.0, 2.5, math.nan, 2.25, 2.75, *(2.5 - 0.125 * number for number in range(8))]


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return compiled(small)


def life(schedule: Schedule, store: Path, losses: list[float]) -> list[checkflow.Event]:
    training, told = small(), list[checkflow.Event]()
    with attached(training, schedule, store, on_event=told.append) as ckpt:
        ckpt.restore()
        for loss in losses:
            training.iteration()
            ckpt.step(loss=torch.tensor(loss, requires_grad=True))
    return [event for event in told if isinstance(event, checkflow.Continued | checkflow.Doubted)]


@pytest.mark.parametrize(
    ("after", "goes_on"),
    [([1.625, 1.5, 9.0], True), ([1.5, 9.0], False), ([math.nan, 1.5], False), ([-3.0, -3.0], False), ([1.5], None)],
)
def test_a_resume_tells_whether_the_loss_goes_on(
    after: list[float], goes_on: bool | None, schedule: Schedule, tmp_path: Path
) -> None:
    """By the first two iterations; what was no number before it is left out."""
    assert life(schedule, tmp_path, BEFORE) == []
    loaded = load_newest(tmp_path).loaded
    assert loaded is not None
    kept = parse_record(loaded.record).losses
    assert kept == tuple(loss for loss in BEFORE if math.isfinite(loss))[-KEPT:]
    told = life(schedule, tmp_path, after)
    assert [isinstance(event, checkflow.Continued) for event in told] == ([] if goes_on is None else [goes_on])
    assert [event.iteration for event in told] == [len(BEFORE) + 2] * len(told)
    if goes_on:
        assert str(told[0]) == "the loss goes on: 1.625, 1.5 after the resume, 1.625 to 2.75 before it"
    elif told:
        assert "after the resume, and was 1.625 to 2.75 in the 10 iterations before it; see that" in str(told[0])


def test_who_gives_no_loss_is_told_nothing(schedule: Schedule, tmp_path: Path) -> None:
    """Also where only the resumed life gives it, and where too few were before."""
    assert life(schedule, tmp_path, [2.0, 2.0]) == []
    assert life(schedule, tmp_path, [9.0, 9.0, 9.0]) == []


@pytest.mark.parametrize(("loss", "kind"), [(torch.ones(2), "a tensor of 2 elements"), ("1.0", "a str")])
def test_what_is_no_loss_is_refused(loss: object, kind: str) -> None:
    with pytest.raises(checkflow.InputError, match=f"step: loss is {kind}; give a number or a tensor of one element"):
        Losses().add(loss)


def test_numbers_of_all_kinds_are_losses() -> None:
    losses = Losses()
    for loss in (1, 1.5, np.float32(1.25), torch.tensor([[0.5]], dtype=torch.bfloat16)):
        losses.add(loss)
    assert losses.known == (1.0, 1.5, 1.25, 0.5)
