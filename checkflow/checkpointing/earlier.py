"""What earlier versions wrote otherwise."""

from __future__ import annotations

from collections.abc import Callable

from checkflow.schedule import Schedule, ViewRow
from checkflow.state.live import walk
from checkflow.state.names import in_state_dict, unwrap
from checkflow.training import Training


def of_now(schedule: Schedule, training: Training) -> Schedule:
    """The schedule under the names of state_dict, and of a compiled model under those of what was compiled, where it
    has those of its wrapper."""
    if any(in_state_dict(name) != name for name in _names(schedule)):
        schedule = _renamed(schedule, in_state_dict, of_modules=False)
    inside = {name for name in _names(schedule) if unwrap(name) != name}
    if not inside or any(live.name in inside for live in walk(training)):
        return schedule
    return _renamed(schedule, unwrap, of_modules=True)


def _names(schedule: Schedule) -> set[str]:
    return {view.name for row in schedule.state for view in row.views}


def _renamed(schedule: Schedule, name_of: Callable[[str], str], *, of_modules: bool) -> Schedule:
    """`of_modules`: anchors at them, too, whose subjects are paths in the model and no names of state."""

    def renamed(view: ViewRow) -> ViewRow:
        return view.model_copy(update={"name": name_of(view.name)})

    return schedule.model_copy(
        update={
            "state": tuple(row.model_copy(update={"views": tuple(map(renamed, row.views))}) for row in schedule.state),
            "gradients": tuple(
                row.model_copy(update={"parameter": renamed(row.parameter)}) for row in schedule.gradients
            ),
            "anchors": tuple(
                one.model_copy(update={"subject": name_of(one.subject)})
                if of_modules or one.kind == "gradient"
                else one
                for one in schedule.anchors
            ),
        }
    )
