"""A schedule's actions against the rules "As executed" of docs/model.md: hooks run only at anchors."""

from __future__ import annotations

from collections.abc import Sequence

from checkflow.schedule import ActionRow, Place, Schedule
from checkflow.verify.coverage import check_coverage
from checkflow.verify.failure import fail
from checkflow.verify.link import fifo, late_bytes
from checkflow.verify.memory import Hold
from checkflow.verify.plan import check_created
from checkflow.verify.rows import Part, named
from checkflow.verify.terms import Terms, first_from, last_to


def executed_holds(schedule: Schedule, parts: Sequence[Part], terms: Terms) -> list[Hold]:
    """The snapshots' memory when each action (its part beside it) is carried out. Raises VerificationError."""
    actions, positions = schedule.actions, [anchor.position for anchor in schedule.anchors]
    check_coverage(terms, parts, "actions")
    wheres = [named(terms, "actions", number, part) for number, part in enumerate(parts)]
    for where, action in zip(wheres, actions, strict=True):
        for name, place in (("snapshot", action.snapshot), ("offload", action.offload), ("release", action.release)):
            if place is not None and place[1] > len(positions):
                fail(f"{where}: {name} at anchor {place[1]}, but the last is {len(positions)}")
    _check_order(actions, wheres, schedule.interval)

    def at(place: Place) -> int:
        return (place[0] - 1) * terms.steps + positions[place[1] - 1]

    issued = [at(action.offload) for action in actions]
    link = fifo(terms, "actions", issued, [action.bytes for action in actions])
    holds = []
    for where, action, part, position, (_, end) in zip(wheres, actions, parts, issued, link, strict=True):
        release, deadline = terms.state[part.state].window
        release = first_from(release, positions, terms.steps)
        deadline = last_to(deadline, positions, terms.steps)
        if action.snapshot is None and action.release is None:
            if position < release:
                fail(f"{where}: a direct offload at position {position} is before its tensor's release, {release}")
            if end > terms.clock(deadline):
                late = late_bytes(end, terms.clock(deadline))
                fail(f"{where}: a direct offload with {late} bytes still to move at its deadline, position {deadline}")
        elif action.snapshot is None or action.release is None:
            fail(f"{where}: a snapshot and its release stand together or not at all")
        else:
            created, freed = at(action.snapshot), at(action.release)
            check_created(where, created, release, deadline)
            if action.offload < action.snapshot:
                fail(f"{where}: offload at {action.offload} comes before its snapshot at {action.snapshot}")
            if terms.clock(freed) < end:
                late = late_bytes(end, terms.clock(freed))
                fail(f"{where}: released at position {freed} with {late} bytes still to move")
            holds.append(Hold(created + 1, freed, action.bytes))
    return holds


def _check_order(actions: Sequence[ActionRow], wheres: Sequence[str], interval: int) -> None:
    """Offloads are issued in list order, and all of one checkpoint before all of the next."""
    for where, action, previous in zip(wheres[1:], actions[1:], actions, strict=False):
        if action.offload < previous.offload:
            fail(f"{where}: offload at {action.offload} comes before the previous row's at {previous.offload}")
    if actions:
        following: Place = (actions[0].offload[0] + interval, actions[0].offload[1])
        if actions[-1].offload > following:
            fail(
                f"{wheres[-1]}: offload at {actions[-1].offload} comes after the next checkpoint's first at {following}"
            )
