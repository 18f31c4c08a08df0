"""Where a policy pauses: training waits for all of a checkpoint, it is counted, and what was held goes after it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import small_trainings as trainings
import torch
from torn import Case, LateDevice, Rig, random_schedule, rig

from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Snapshot
from checkflow.schedule import Place, Schedule


def momentum() -> Case:
    """Without buffers, whose guards would wait before the pause."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return trainings.plain(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), model)


class Holding(LateDevice):
    """Copies only what is waited for; says how many bytes of snapshots it gave back."""

    released_bytes = 0

    def __init__(self, counters: Counters) -> None:
        super().__init__(counters, lag=10**9, few_bytes=0)

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def release(self, snapshot: Snapshot, event: object, /) -> None:
        super().release(snapshot, event)  # type: ignore[arg-type]
        self.released_bytes += snapshot.data.numel()


def paused(pause: Place, *, held: bool) -> tuple[Rig, Holding, Schedule]:
    """All is issued at the iteration's end, from snapshots if `held`, which are released at the pause."""
    drawn = random_schedule(momentum, 0)
    end = (0, len(drawn.anchors))
    places = {"offload": end, "snapshot": end if held else None, "release": pause if held else None}
    actions = tuple(row.model_copy(update=places) for row in drawn.actions)
    schedule = drawn.model_copy(update={"pause": pause, "actions": actions})
    devices: list[Holding] = []

    def device(counters: Counters) -> Holding:
        devices.append(Holding(counters))
        return devices[-1]

    made = rig(momentum, schedule, device=device)
    return made, devices[0], schedule


def watched(case: Case, device: Holding) -> tuple[list[int], list[int]]:
    """How many copies are pending before the model's forward begins, and after it, in each iteration."""
    before: list[int] = []
    after: list[int] = []

    def begin(_module: torch.nn.Module, _args: Sequence[object]) -> None:
        before.append(device.pending)

    def end(*_: object) -> None:
        after.append(device.pending)

    (model,) = case.training.models
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)
    return before, after


def number_of(kind: str, schedule: Schedule) -> int:
    return next(n for n, a in enumerate(schedule.anchors, start=1) if (a.kind, a.subject) == (kind, "model"))


@pytest.mark.parametrize("held", [False, True])
def test_training_stands_still_until_all_has_arrived(held: bool) -> None:
    """At the iteration's end nothing waits; before the pause all is pending, after it nothing is."""
    drawn = random_schedule(momentum, 0)
    made, device, schedule = paused((1, number_of("forward", drawn)), held=held)
    before, after = watched(made.case, device)
    made.run(5)
    assert not before[0] and all(before[1:]) and not any(after)
    assert set(made.counters.waits) - {Cause.LOOK} == {Cause.PAUSE} and made.counters.waits[Cause.PAUSE] == 4
    state = sum(row.bytes for row in schedule.actions)
    assert made.counters.snapshot_bytes == (5 * state if held else 0)
    assert device.released_bytes == (4 * state if held else 0)
    made.close()
    assert made.torn() == [] and made.sink.order == [1, 2, 3, 4, 5]


def test_at_the_iterations_end_it_is_whole_when_step_returns() -> None:
    """As a synchronous save is."""
    drawn = random_schedule(momentum, 0)
    made, device, _ = paused((0, len(drawn.anchors)), held=False)
    for iteration in range(1, 4):
        made.run(1)
        assert not device.pending and made.sink.order[-1] == iteration
    assert made.counters.waits[Cause.PAUSE] == 3
    made.close()


def test_where_its_anchor_never_fires_the_next_one_that_does_pauses() -> None:
    """A forward that is called without its hooks costs no checkpoint."""
    drawn = random_schedule(momentum, 0)
    made, device, _ = paused((1, number_of("forward_pre", drawn)), held=True)
    (model,) = made.case.training.models
    made.run(1)
    hooks = dict(model._forward_pre_hooks)
    model._forward_pre_hooks.clear()
    assert device.pending
    made.run(1)
    model._forward_pre_hooks.update(hooks)
    made.run(2)
    made.close()
    assert made.torn() == [] and made.sink.order == [1, 2, 3, 4]


def test_what_has_arrived_is_not_waited_for() -> None:
    """A pause that finds nothing under way is none."""
    drawn = random_schedule(momentum, 0)
    schedule = drawn.model_copy(update={"pause": (1, number_of("forward", drawn))})
    made = rig(momentum, schedule, lag=0)
    made.run(4)
    made.close()
    assert made.counters.waits[Cause.PAUSE] == 0 and made.sink.order == [1, 2, 3, 4]
