"""A discrete-event simulation of link, compute stream and guards: what waits when timings are not those of the plan.

It does what checkflow/runtime does (docs/runtime.md). The compute stream passes anchors in order; each issues its
offloads, which the link carries one after the other; a guard waits for what still reads the tensors it guards, a
release for its own transfer, a pause for all that was issued. Time is exact: ticks of 1e-9 byte, as in Problem.clock.

Not simulated: a slot to fill is always free; copies of state that the iteration does not write, once for each slot;
the time of the snapshots' own copies on the compute stream, which the plan takes for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from checkflow.errors import InputError
from checkflow.plan import TICKS_PER_BYTE, Problem
from checkflow.plan.timeline.queue import Passage
from checkflow.runtime.counters import Cause
from checkflow.schedule import ActionRow, Schedule
from checkflow.simulation.route import Route, Turn, route_of


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the compute stream, in ticks."""

    time_ticks: int  # stalls included
    stall_ticks: Mapping[Cause, int]

    @property
    def stalled_ticks(self) -> int:
        return sum(self.stall_ticks.values())


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened. A tick is 1e-9 byte's time on the link, 1 / bandwidth_bytes_per_s ns."""

    bandwidth_bytes_per_s: int
    iterations: tuple[Iteration, ...]
    link_busy_ticks: int  # what the issued offloads take
    passages: tuple[Passage[ActionRow], ...]  # of the last checkpoint issued whole, ticks since its iteration ended

    @property
    def time_ns(self) -> tuple[int, ...]:
        """Of each iteration, stalls included, rounded down."""
        return tuple(iteration.time_ticks // self.bandwidth_bytes_per_s for iteration in self.iterations)

    @property
    def stall_ns(self) -> tuple[int, ...]:
        """Of each iteration, rounded down."""
        return tuple(iteration.stalled_ticks // self.bandwidth_bytes_per_s for iteration in self.iterations)

    @property
    def stall_ns_by_cause(self) -> dict[Cause, int]:
        """In all iterations together, rounded down; causes for which nothing waited are absent."""
        total: Counter[Cause] = Counter()
        for iteration in self.iterations:
            total.update(iteration.stall_ticks)
        return {cause: ticks // self.bandwidth_bytes_per_s for cause, ticks in total.items()}

    @property
    def link_busy_ns(self) -> int:
        return self.link_busy_ticks // self.bandwidth_bytes_per_s


def simulate(
    schedule: Schedule, problem: Problem, times_ns: Sequence[Sequence[int]], ticks_per_byte: Sequence[int] | None = None
) -> Simulated:
    """Play a schedule from an idle link.

    Args:
        schedule: `verify` accepts it for the graph of the problem.
        problem: plan.problem_of(graph, ...); its bandwidth is the link's, its times play no part.
        times_ns: for each iteration, of each operator.
        ticks_per_byte: for each iteration, what the link takes for each byte that is issued in it. 1e9, the default, is
            the bandwidth's own; 2e9 is half of it.

    Raises InputError where the lengths do not fit the schedule, or a figure makes no sense.
    """
    return follow(route_of(schedule, problem), times_ns, problem.bandwidth_bytes_per_s, ticks_per_byte)


def play(schedule: Schedule, problem: Problem) -> tuple[Passage[ActionRow], ...]:
    """One checkpoint's actions in the steady state, at the times and bandwidth of `problem`."""
    route = route_of(schedule, problem)
    return follow(route, [problem.time_ns] * route.settled, problem.bandwidth_bytes_per_s).passages


def follow(
    route: Route,
    times_ns: Sequence[Sequence[int]],
    bandwidth_bytes_per_s: int,
    ticks_per_byte: Sequence[int] | None = None,
) -> Simulated:
    """`simulate` for a route that is followed more than once."""
    _check(route, times_ns, bandwidth_bytes_per_s, ticks_per_byte)
    player = _Player(route)
    before: Sequence[int] | None = None
    arrivals: list[int] = []
    for number, times in enumerate(times_ns, start=1):
        if times is not before:
            clock = (0, *accumulate(times))
            arrivals = [clock[position] * bandwidth_bytes_per_s for position in (*route.positions, route.steps)]
            before = times
        player.iterate(number, arrivals, TICKS_PER_BYTE if ticks_per_byte is None else ticks_per_byte[number - 1])
    return Simulated(bandwidth_bytes_per_s, tuple(player.iterations), player.busy, player.passages())


class _Player:
    """Follows a route, one iteration after the other. All times are ticks since the first one began."""

    def __init__(self, route: Route) -> None:
        self.iterations: list[Iteration] = []
        self.busy = 0
        self._route = route
        self._now = 0
        self._free = 0  # when the link has carried all that was issued
        self._reading = [0] * len(route.guards)  # until when the link reads what each of them guards
        self._ends: dict[tuple[int, int], int] = {}  # (checkpoint, action) -> its end, until it is released
        self._ended = [0]  # when each iteration did, from iteration 0
        self._moves: dict[int, list[tuple[int, int, int]]] = {}  # checkpoint -> (action, begin, end)
        self._whole = 0  # the last checkpoint that was issued whole
        self._stalls: Counter[Cause] = Counter()  # of the running iteration

    def iterate(self, number: int, arrivals: Sequence[int], ticks_per_byte: int) -> None:
        """Iteration `number`, from 1. `arrivals`: ticks from its beginning to each stop and to its end, unstalled."""
        began, interval = self._now, self._route.schedule.period
        self._stalls = Counter()
        unstalled = 0
        for stop, arrival in zip(self._route.stops, arrivals, strict=False):
            self._now += arrival - unstalled
            unstalled = arrival
            for turn in stop.turns:
                checkpoint = number - turn.age
                if checkpoint > 0 and checkpoint % interval == 0:
                    self._take(turn, checkpoint, ticks_per_byte)
            for guard in stop.guards:
                self._wait(self._reading[guard], self._route.guards[guard])
        self._now += arrivals[-1] - unstalled
        self._ended.append(self._now)
        self.iterations.append(Iteration(self._now - began, dict(self._stalls)))

    def passages(self) -> tuple[Passage[ActionRow], ...]:
        rows, origin = self._route.schedule.actions, self._ended[self._whole]
        return tuple(
            Passage(rows[action], begin - origin, end - origin)
            for action, begin, end in self._moves.get(self._whole, ())
        )

    def _take(self, turn: Turn, checkpoint: int, ticks_per_byte: int) -> None:
        for action in turn.releases:
            self._wait(self._ends.pop((checkpoint, action)), Cause.RELEASE)
        for offload in turn.offloads:
            begin = max(self._free, self._now)
            took = offload.size_bytes * ticks_per_byte
            self._free = begin + took
            self.busy += took
            if offload.held:
                self._ends[checkpoint, offload.action] = self._free
            if offload.guard is not None:
                self._reading[offload.guard] = self._free
            self._note(checkpoint, (offload.action, begin, self._free))
        if turn.pauses:
            self._wait(self._free, Cause.PAUSE)
        for action in turn.late_releases:
            self._wait(self._ends.pop((checkpoint, action)), Cause.RELEASE)

    def _note(self, checkpoint: int, move: tuple[int, int, int]) -> None:
        moves = self._moves.setdefault(checkpoint, [])
        moves.append(move)
        if len(moves) == len(self._route.schedule.actions):
            self._moves.pop(self._whole, None)
            self._whole = checkpoint

    def _wait(self, until: int, cause: Cause) -> None:
        if until > self._now:
            self._stalls[cause] += until - self._now
            self._now = until


def _check(
    route: Route, times_ns: Sequence[Sequence[int]], bandwidth_bytes_per_s: int, ticks_per_byte: Sequence[int] | None
) -> None:
    if bandwidth_bytes_per_s < 1:
        raise InputError(f"bandwidth_bytes_per_s: {bandwidth_bytes_per_s} is not positive; give at least 1")
    for number, times in enumerate(times_ns, start=1):
        if len(times) != route.steps or min(times) < 0:
            raise InputError(
                f"times_ns: iteration {number} has {len(times)} times, the least {min(times, default=0)}; give one of "
                f"at least 0 for each of the {route.steps} operators"
            )
    if ticks_per_byte is not None and (len(ticks_per_byte) != len(times_ns) or min(ticks_per_byte, default=1) < 1):
        raise InputError(f"ticks_per_byte: {len(ticks_per_byte)} given; give one above 0 for each of the iterations")
