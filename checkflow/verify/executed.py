"""A schedule's actions against the rules "As executed" of docs/model.md: hooks run only at anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from checkflow.schedule import ActionRow, Place, Schedule
from checkflow.verify.coverage import check_coverage
from checkflow.verify.failure import fail
from checkflow.verify.link import fifo, from_idle, late_bytes
from checkflow.verify.memory import Hold
from checkflow.verify.plan import check_created
from checkflow.verify.rows import Part, named
from checkflow.verify.terms import Terms, first_from, last_to


class Executed(NamedTuple):
    """What carrying the actions out takes."""

    holds: list[Hold]  # the snapshots' memory
    pause_ns: int  # of training, for each checkpoint
    paused_bytes: int  # of memory meanwhile; 0 where there is no pause


def executed(schedule: Schedule, parts: Sequence[Part], terms: Terms) -> Executed:
    """What carrying out each action (its part beside it) takes. Raises VerificationError."""
    actions, positions = schedule.actions, [anchor.position for anchor in schedule.anchors]
    check_coverage(terms, parts, "actions")
    wheres = [named(terms, "actions", number, part) for number, part in enumerate(parts)]
    for where, action in zip(wheres, actions, strict=True):
        for name, place in (("snapshot", action.snapshot), ("offload", action.offload), ("release", action.release)):
            if place is not None and place[1] > len(positions):
                fail(f"{where}: {name} at anchor {place[1]}, but the last is {len(positions)}")
    _check_order(actions, wheres, schedule.period)

    def at(place: Place) -> int:
        return (place[0] - 1) * terms.steps + positions[place[1] - 1]

    issued = [at(action.offload) for action in actions]
    sizes, pause = [action.bytes for action in actions], schedule.pause
    if pause is None:
        link, paused_at, paused = fifo(terms, "actions", issued, sizes), None, 0
    else:
        _check_pause(pause, schedule)
        link, paused_at = from_idle(terms, issued, sizes), at(pause)
        paused = max(0, link[-1][1] - terms.clock(paused_at))
    holds = []
    for where, action, part, position, (_, end) in zip(wheres, actions, parts, issued, link, strict=True):
        release, deadline = terms.state[part.state].window
        release = first_from(release, positions, terms.steps)
        deadline = last_to(deadline, positions, terms.steps)
        if action.snapshot is None and action.release is None:
            if position < release:
                fail(f"{where}: a direct offload at position {position} is before its tensor's release, {release}")
            waits = paused_at is not None and deadline >= paused_at
            if not waits and end > terms.clock(deadline):
                late = late_bytes(end, terms.clock(deadline))
                fail(f"{where}: a direct offload with {late} bytes still to move at its deadline, position {deadline}")
        elif action.snapshot is None or action.release is None:
            fail(f"{where}: a snapshot and its release stand together or not at all")
        else:
            created, freed = at(action.snapshot), at(action.release)
            check_created(where, created, release, deadline)
            if action.offload < action.snapshot:
                fail(f"{where}: offload at {action.offload} comes before its snapshot at {action.snapshot}")
            waits = pause is not None and action.release >= pause
            if not waits and terms.clock(freed) < end:
                late = late_bytes(end, terms.clock(freed))
                fail(f"{where}: released at position {freed} with {late} bytes still to move")
            holds.append(Hold(created + 1, freed, action.bytes))
    paused_bytes = 0
    if pause is not None and paused_at is not None:
        beside = terms.resident_bytes[(paused_at - 1) % terms.steps], terms.resident_bytes[paused_at % terms.steps]
        paused_bytes = min(beside) + _held_at(pause, actions, schedule.period)
    return Executed(holds, -(-paused // terms.bandwidth_bytes_per_s), paused_bytes)


def _held_at(pause: Place, actions: Sequence[ActionRow], interval: int) -> int:
    """Bytes of the snapshots of any checkpoint that are there at a checkpoint's pause.

    At one place the older checkpoint comes first, and of one its snapshots, its pause and then its releases.
    """
    held = 0
    for action in actions:
        if action.snapshot is not None and action.release is not None:
            turns = action.release[0] // interval + pause[0] // interval + 1
            for age in range(-turns, turns + 1):  # of a checkpoint that is so many older than the one that pauses
                made = action.snapshot[0] - age * interval, action.snapshot[1]
                freed = action.release[0] - age * interval, action.release[1]
                is_made = made < pause or (made == pause and age >= 0)
                is_freed = freed < pause or (freed == pause and age > 0)
                held += action.bytes if is_made and not is_freed else 0
    return held


def _check_pause(pause: Place, schedule: Schedule) -> None:
    """It waits for the whole of a checkpoint, which is that of an iteration that ended, and for nothing of the next."""
    actions, interval, end = schedule.actions, schedule.period, (0, len(schedule.anchors))
    if pause[1] > len(schedule.anchors):
        fail(f"pause: at anchor {pause[1]}, but the last is {len(schedule.anchors)}")
    if not actions:
        fail("pause: there is no action to wait for")
    if pause < max(end, actions[-1].offload):
        fail(f"pause: at {pause}, before the iteration's end, {end}, or the last offload, {actions[-1].offload}")
    following: Place = (actions[0].offload[0] + interval, actions[0].offload[1])
    if pause > following:
        fail(f"pause: at {pause}, after the next checkpoint's first offload at {following}")


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
