"""What the compute stream meets in an iteration, in order: anchors that move bytes, and guards that wait for them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from checkflow.errors import InputError
from checkflow.graph import Role
from checkflow.plan import Problem
from checkflow.runtime.counters import Cause
from checkflow.runtime.timetable import ActionKind, timetable_of
from checkflow.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Offload:
    """One action handed to the link. A guard waits for a direct one (no snapshot), but of a gradient: it is held."""

    action: int  # index into Schedule.actions
    size_bytes: int
    guard: int | None  # index into Route.guards
    held: bool  # until its release


@dataclass(frozen=True, slots=True)
class Turn:
    """What one anchor does for the checkpoint of `age` iterations ago. Snapshots take no time here."""

    age: int
    releases: tuple[int, ...]  # actions offloaded before
    offloads: tuple[Offload, ...]
    pauses: bool  # until all of the checkpoint has arrived
    late_releases: tuple[int, ...]  # of actions that this very anchor offloads, or for which it pauses


@dataclass(frozen=True, slots=True)
class Stop:
    """A place at which something happens: first the turns, then the guards."""

    position: int
    turns: tuple[Turn, ...]  # oldest checkpoint first
    guards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """A schedule as the compute stream meets it, the same in each iteration."""

    schedule: Schedule
    steps: int
    stops: tuple[Stop, ...]
    guards: tuple[Cause, ...]
    oldest: int  # age of the oldest checkpoint in flight, iterations

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the stops."""
        return tuple(stop.position for stop in self.stops)

    @property
    def settled(self) -> int:
        """An iteration by which the link's queue repeats, if nothing waits: the second checkpoint has left by then."""
        return 2 * self.schedule.period + self.oldest


@dataclass(slots=True)
class _Acts:
    releases: list[int] = field(default_factory=list)
    offloads: list[int] = field(default_factory=list)
    pauses: bool = False


def route_of(schedule: Schedule, problem: Problem) -> Route:
    """The route of a schedule that `verify` accepts for the graph of this problem, whose times play no part.

    A guard stands where PyTorch runs its hook, at the last anchor before the first write of what it guards. Raises
    InputError where the two are not of one trace.
    """
    written = {tensor.tensor for tensor in problem.state} | {row.id for row in schedule.gradients}
    if schedule.steps != problem.steps or any(row.tensor not in written for row in schedule.actions):
        raise InputError(
            f"schedule: of {schedule.model} with {schedule.steps} operators, and not of this graph, which has "
            f"{problem.steps}; give the graph that it was made from"
        )
    guards, guard_of = _guards(schedule, problem)
    acts: dict[tuple[int, int], _Acts] = {}  # (anchor, age)
    timetable = timetable_of(schedule)

    def acts_at(time: int) -> _Acts:
        age, anchor = divmod(time, timetable.anchor_count + 1)
        return acts.setdefault((anchor, age), _Acts())

    if timetable.pause is not None:
        acts_at(timetable.pause).pauses = True
    for time, kind, action in timetable.events:
        here = acts_at(time)
        if kind is ActionKind.OFFLOAD:
            here.offloads.append(action)
        elif kind is ActionKind.RELEASE:
            here.releases.append(action)
    turns: dict[int, list[Turn]] = {}
    for (anchor, age), here in sorted(acts.items(), reverse=True):
        turns.setdefault(anchor, []).append(_turn(schedule, age, here, guard_of))
    where = [anchor for anchor, _ in guards]
    return Route(
        schedule=schedule,
        steps=schedule.steps,
        stops=tuple(
            Stop(
                position=schedule.anchors[anchor - 1].position if anchor else 0,
                turns=tuple(turns.get(anchor, ())),
                guards=tuple(guard for guard, its in enumerate(where) if its == anchor),
            )
            for anchor in sorted({*turns, *where})
        ),
        guards=tuple(cause for _, cause in guards),
        oldest=max((age for _, age in acts), default=0),
    )


def _guards(schedule: Schedule, problem: Problem) -> tuple[list[tuple[int, Cause]], dict[int, int]]:
    """The guards as (anchor, cause), 0 for the iteration's beginning, and which one guards each state tensor."""
    positions = [anchor.position for anchor in schedule.anchors]
    guards: dict[tuple[int, Cause], int] = {}
    guard_of: dict[int, int] = {}
    for tensor in problem.state:
        anchor = bisect_left(positions, tensor.first_write)
        cause = Cause.FORWARD if tensor.role is Role.BUFFER else Cause.OPTIMIZER
        guard_of[tensor.tensor] = guards.setdefault((anchor, cause), len(guards))
    return list(guards), guard_of


def _turn(schedule: Schedule, age: int, acts: _Acts, guard_of: dict[int, int]) -> Turn:
    rows, new = schedule.actions, set(acts.releases) if acts.pauses else set(acts.offloads)
    return Turn(
        age=age,
        releases=tuple(action for action in acts.releases if action not in new),
        offloads=tuple(
            Offload(
                action,
                rows[action].bytes,
                guard_of.get(rows[action].tensor) if rows[action].snapshot is None else None,
                held=rows[action].release is not None,
            )
            for action in acts.offloads
        ),
        pauses=acts.pauses,
        late_releases=tuple(action for action in acts.releases if action in new),
    )
