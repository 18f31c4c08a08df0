"""What earlier versions wrote otherwise."""

from __future__ import annotations

from checkflow.schedule import Schedule
from checkflow.state.live import walk
from checkflow.state.names import unwrap
from checkflow.training import Training


def of_now(schedule: Schedule, training: Training) -> Schedule:
    """The schedule of a compiled model under the names of what was compiled, where it has those of its wrapper."""
    inside = {view.name for row in schedule.state for view in row.views if unwrap(view.name) != view.name}
    if not inside or any(live.name in inside for live in walk(training)):
        return schedule
    views = (
        (row, [view.model_copy(update={"name": unwrap(view.name)}) for view in row.views]) for row in schedule.state
    )
    return schedule.model_copy(
        update={
            "state": tuple(row.model_copy(update={"views": tuple(renamed)}) for row, renamed in views),
            "anchors": tuple(one.model_copy(update={"subject": unwrap(one.subject)}) for one in schedule.anchors),
        }
    )
