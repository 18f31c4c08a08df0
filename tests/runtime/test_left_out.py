"""A schedule that leaves out bytes, though none that is read or attached may: no checkpoint is sealed over a hole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import small_trainings as trainings
from torn import Factory, random_schedule, rig

from checkflow.schedule import ActionRow

Actions = tuple[ActionRow, ...]


def halved(actions: Actions) -> Actions:
    size_bytes = actions[-1].bytes // 2
    return (*actions[:-1], actions[-1].model_copy(update={"bytes": size_bytes}))


@pytest.mark.parametrize("left", [lambda rows: rows[1:], halved, lambda _: ()], ids=["dropped", "halved", "all"])
@pytest.mark.parametrize(
    "factory", [trainings.sgd, trainings.momentum, trainings.adamw_foreach, trainings.adamw_looped]
)
@pytest.mark.parametrize("lag", [0, 5])
def test_what_actions_leave_out_is_read_when_the_iteration_ends(
    factory: Factory, left: Callable[[Actions], Actions], lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As what does not lie in memory as planned is; it is told once."""
    schedule = random_schedule(factory, 3)
    made = rig(factory, schedule.model_copy(update={"actions": left(schedule.actions)}), lag=lag)
    made.run(6)
    made.close()
    assert made.sink.order == [1, 2, 3, 4, 5, 6]
    assert made.torn() == []
    told = [line for line in caplog.messages if "leaves out bytes" in line]
    assert told and len(told) == len(set(told))


def test_nothing_is_said_of_a_schedule_that_moves_all(caplog: pytest.LogCaptureFixture) -> None:
    made = rig(trainings.adamw_foreach, random_schedule(trainings.adamw_foreach, 3), lag=0)
    made.run(3)
    made.close()
    assert made.torn() == [] and not caplog.messages
