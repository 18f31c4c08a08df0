"""State that code writes between step() and its guard: no checkpoint is torn by it, and it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import small_trainings as trainings
import torch
from torn import Rig, random_schedule, rig

from checkflow.runtime import outside
from checkflow.runtime.outside import Outside

TOLD = "was written after step() and before its update"


def counted(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1.0)


def uncounted(tensor: torch.Tensor) -> None:
    tensor.data.add_(1.0)


def made_of(seed: int, lag: int = 10**9) -> Rig:
    return rig(trainings.adamw_foreach, random_schedule(trainings.adamw_foreach, seed, snapshots=0.0), lag=lag)


def first_weight(made: Rig) -> torch.Tensor:
    return next(made.case.training.models[0].parameters())


WAYS = pytest.mark.parametrize("write", [counted, uncounted], ids=lambda way: way.__name__)


@WAYS
@pytest.mark.parametrize("lag", [0, 3, 10**9])
def test_it_costs_one_checkpoint_and_is_waited_for_from_then_on(
    write: Callable[[torch.Tensor], None], lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(4):
        caplog.clear()
        made = made_of(seed, lag)
        for _ in range(8):
            made.run(1)
            write(first_weight(made))
        made.close()
        assert made.torn() == [] and len(made.sink.order) >= 7
        lines = [line for line in caplog.messages if TOLD in line]
        assert len(lines) == 1 and lines[0].startswith("model/0.weight: "), caplog.messages
        assert "model/0.weight" in {storage.name for storage in made.executor.bound.unwatched}


def test_a_write_that_begins_an_iteration_is_not_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing tells whether it ends one or begins one, so both are said, and that it is waited for once."""
    made = made_of(0)
    weights = list(made.case.training.models[0].parameters())
    for number in range(8):
        if number >= 3:
            counted(weights[0 if number < 5 else 1])
        made.run(1)
    made.close()
    lines = [line for line in caplog.messages if TOLD in line]
    assert len(lines) == 2 and made.torn() == []
    for line in lines:
        assert "if an iteration ends with that, a resume goes on without it, so call step() after it;" in line
        assert "if one begins with it, or it is undone by then, nothing is lost" in line
    assert ["training waits" in line for line in lines] == [True, False]


@pytest.mark.parametrize("then", ["staged before any guard", "an iteration without an update"])
def test_it_is_seen_before_its_guard_fires(then: str) -> None:
    """What was in flight when it was written is given up, and no checkpoint that begins after it."""
    for seed in range(4):
        made = made_of(seed)
        made.run(2)
        counted(first_weight(made))
        if then == "staged before any guard":
            made.executor.drain()
        else:
            made.mark()
        made.run(2)
        made.close()
        assert made.torn() == [] and made.sink.order == [1, *range(3, made.executor.completed + 1)]


@WAYS
def test_unseen_it_would_tear_checkpoints(
    write: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outside, "_written", lambda *_: [])
    torn = []
    for seed in range(4):
        made = made_of(seed)
        for _ in range(8):
            made.run(1)
            write(first_weight(made))
        made.close()
        torn += made.torn()
    assert torn


def test_a_write_that_nothing_counts_is_found_later_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is looked again."""
    monkeypatch.setattr(outside, "SELDOM", 0)
    made = made_of(0)
    made.run(6)
    assert not caplog.messages
    uncounted(first_weight(made))
    made.run(2)
    made.close()
    assert made.torn() == [] and [TOLD in line for line in caplog.messages] == [True]


@WAYS
@pytest.mark.parametrize("where", ["before step()", "a checkpoint that is loaded"])
def test_what_guards_or_the_iterations_end_cover_is_not_told(
    write: Callable[[torch.Tensor], None], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = made_of(1)
    for number in range(6):
        made.case.iterate(number)
        if where == "before step()":
            write(first_weight(made))
        made.mark()
        if where != "before step()":
            model = made.case.training.models[0]
            model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    made.close()
    assert made.torn() == [] and made.sink.order == list(range(1, 7))
    assert not [line for line in caplog.messages if TOLD in line]
