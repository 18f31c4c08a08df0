"""A schedule's actions as events: what may leave with others leaves with others, and nothing else moves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import small_trainings as trainings
import torch
from torch import nn
from torn import Case, random_schedule, rig

from checkflow.runtime.device import Batch, CopyEvent
from checkflow.runtime.timetable import ActionKind, timetable_of
from checkflow.schedule import read_schedule

SCHEDULES = Path(__file__).parent.parent.parent / "schedules"


def test_few_bytes_wait_for_the_iterations_end() -> None:
    """All moves without a snapshot if they are few, none where they are more; those with one stay where they are."""
    seen = set()
    for seed in range(20):
        schedule = random_schedule(trainings.sgd, seed)
        early = [row for row in schedule.actions if row.snapshot is None and row.offload[0] == 0]
        end = len(schedule.anchors)
        early = [row for row in early if row.offload[1] < end]
        total = sum(row.bytes for row in early)
        apart, one_too_few, together = (timetable_of(schedule, few) for few in (0, total - 1, total))
        if total:
            assert [event for event in one_too_few.events if event[0] < end] == [
                event for event in apart.events if event[0] < end
            ]
        snapshots = {number for number, row in enumerate(schedule.actions) if row.snapshot is not None}
        assert {number for at, kind, number in together.events if kind is ActionKind.OFFLOAD and at < end} <= snapshots
        assert sorted(e for e in together.events if e[2] in snapshots) == sorted(
            e for e in apart.events if e[2] in snapshots
        )
        assert len(together.events) == len(apart.events)
        assert together.used <= apart.used | {end}
        seen.add(together.used < apart.used)
    assert True in seen


def test_without_snapshots_all_wait_for_the_iterations_end_in_the_plans_order() -> None:
    """Where few bytes may leave with others, and nothing holds memory, however many they are."""
    reordered = False
    for seed in range(20):
        planned = random_schedule(trainings.momentum, seed)
        direct = tuple(row.model_copy(update={"snapshot": None, "release": None}) for row in planned.actions)
        schedule = planned.model_copy(update={"actions": direct[::-1]})
        apart, together = (timetable_of(schedule, few) for few in (0, 1))
        assert {at for at, _, _ in together.events} == {len(schedule.anchors)}
        assert [number for _, _, number in together.events] == [number for _, _, number in apart.events]
        reordered |= [number for _, _, number in together.events] != list(range(len(direct)))
    assert reordered


def test_what_needs_no_snapshot_leaves_as_soon_as_the_link_has_had_what_is_before_it() -> None:
    """After the iteration's end: none later than planned, the link's order is the plan's, snapshots stay in place."""
    earlier = 0
    for seed in range(20):
        schedule = random_schedule(trainings.momentum, seed)
        end = len(schedule.anchors)
        apart, together = (timetable_of(schedule, few) for few in (0, 1))
        planned, actual = (
            {number: at for at, kind, number in program.events if kind is ActionKind.OFFLOAD and at > end}
            for program in (apart, together)
        )
        late = {number for number in actual if schedule.actions[number].snapshot is not None}
        assert late == {number for number in planned if schedule.actions[number].snapshot is not None}
        order = [number for at, kind, number in apart.events if kind is ActionKind.OFFLOAD and at > end]
        begun = [number for at, kind, number in together.events if kind is ActionKind.OFFLOAD and number in planned]
        assert begun == order
        places = {number: at for at, kind, number in together.events if kind is ActionKind.OFFLOAD}
        before = end
        for number in order:
            assert places[number] == (planned[number] if number in late else before) <= planned[number]
            before = places[number]
            earlier += places[number] < planned[number]
    assert earlier > 20


def test_copies_are_looked_after_early_and_then_twice_as_late_each_time() -> None:
    """Counted in anchors, after the first of them."""
    schedule = read_schedule(SCHEDULES / "resnet-32.json")
    program = timetable_of(schedule, few_bytes=1)
    count = program.anchor_count
    places = sorted(
        {number for key in program.hooked for number in program.anchors[key].values() if 0 < number <= count}
    )
    assert places[0] <= count / 32
    assert all(later <= 2 * sooner + 1 for sooner, later in itertools.pairwise(places))
    assert len(places) < count / 4


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": True}, {"foreach": True}])
def test_what_one_guard_waits_for_leaves_together(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes, and whatever kind of state: nothing looks inside an update but of foreach functions."""

    def factory() -> Case:
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        return trainings.plain(lambda ps: torch.optim.AdamW(ps, **settings), net)

    planned = random_schedule(factory, 0)
    direct = tuple(row.model_copy(update={"snapshot": None, "release": None}) for row in planned.actions)
    made = rig(factory, planned.model_copy(update={"actions": direct}), lag=0, few_bytes=1)
    given, offload = list[Batch](), made.executor._device.offload

    def counted(batch: Batch) -> CopyEvent:
        given.append(batch)
        return offload(batch)

    monkeypatch.setattr(made.executor._device, "offload", counted)
    made.run(5)
    made.close()
    assert made.torn() == [] and made.sink.order == list(range(1, 6))
    assert (len([batch for batch in given if batch]) > 5) is settings.get("foreach", False)
