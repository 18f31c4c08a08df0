"""What earlier versions wrote otherwise."""

from __future__ import annotations

from checkflow.schedule import Schedule
from checkflow.state.live import walk
from checkflow.state.names import unwrapped
from checkflow.training import Training


def of_now(schedule: Schedule, training: Training) -> Schedule:
    """The schedule of a compiled model under the names of what was compiled, where it has those of its wrapper."""
    inside = {view.name for row in schedule.state for view in row.views if unwrapped(view.name) != view.name}
    if not inside or any(live.name in inside for live in walk(training)):
        return schedule
    rows = tuple(
        row.model_copy(update={"views": tuple(v.model_copy(update={"name": unwrapped(v.name)}) for v in row.views)})
        for row in schedule.state
    )
    anchors = tuple(anchor.model_copy(update={"subject": unwrapped(anchor.subject)}) for anchor in schedule.anchors)
    return schedule.model_copy(update={"state": rows, "anchors": anchors})
