"""A link played event by event, as slowly as it takes to be obviously right. It shares no code with the package."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkflow.plan import Plan, Problem, StateTensor


def clock(problem: Problem, position: int) -> int:
    """Ticks of the link at an unrolled position, an iteration or a step at a time."""
    times = problem.time_ns
    whole = sum(times) * (position // len(times))
    return problem.bandwidth_bytes_per_s * (whole + sum(times[: position % len(times)]))


def window(problem: Problem, state: StateTensor) -> tuple[int, int]:
    """From the end of the last write, an iteration before, to the position before the first one."""
    return state.last_write - len(problem.time_ns), state.first_write - 1


@dataclass(frozen=True)
class Request:
    """A transfer that may begin at an unrolled position; with `live`, it reads that state tensor and no snapshot."""

    ready: int
    size_bytes: int
    live: int | None


def requests_of(plan: Plan, problem: Problem) -> list[Request]:
    """What a direct plan asks of the link."""
    return [
        Request(
            t.snapshot if t.snapshot is not None else window(problem, problem.state[t.chunk.state])[0],
            t.chunk.size_bytes,
            t.chunk.state if t.snapshot is None else None,
        )
        for t in plan.transfers
    ]


CHECKPOINTS = 4  # played, the first on an idle link


def play(problem: Problem, requests: Sequence[Request]) -> tuple[list[tuple[int, int]], list[int]]:
    """(begin, end) in ticks of each transfer of the last checkpoint but one, told from its position 0; late reads.

    A read is late if, at its begin or its end, the tensor no longer (or not yet) holds that checkpoint's value.
    """
    k = problem.interval
    period = clock(problem, k * len(problem.time_ns))
    # (tick, 0: a transfer ends first, position, rank, what, whom)
    events: list[tuple[int, int, int, int, str, int]] = []
    for iteration in range(CHECKPOINTS * k + 1):
        for index, state in enumerate(problem.state):
            base = (iteration - 1) * len(problem.time_ns)
            before, after = base + state.first_write - 1, base + state.last_write
            heapq.heappush(events, (clock(problem, before), 1, before, 2, "overwrite", index))
            heapq.heappush(events, (clock(problem, after), 1, after, 0, "final", index))
    queue = [(c, number) for c in range(CHECKPOINTS) for number in range(len(requests))]
    for place, (c, number) in enumerate(queue):
        position = requests[number].ready + c * k * len(problem.time_ns)
        heapq.heappush(events, (clock(problem, position), 1, position, 1, "ready", place))
    begun_iteration = [-1] * len(problem.state)  # whose value is in the tensor, or being written
    final = [True] * len(problem.state)
    ready: set[int] = set()
    following, busy = 0, False
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    late: list[int] = []

    def check(place: int) -> None:
        c, number = queue[place]
        live = requests[number].live
        if live is not None and not (final[live] and begun_iteration[live] == c * k):
            late.append(number)

    while events:
        tick, _, _, _, what, whom = heapq.heappop(events)
        if what == "overwrite":
            begun_iteration[whom] += 1
            final[whom] = False
        elif what == "final":
            final[whom] = True
        elif what == "ready":
            ready.add(whom)
        else:
            ends[whom] = tick
            busy = False
            check(whom)
        if not busy and following in ready:
            begins[following] = tick
            check(following)
            heapq.heappush(events, (tick + requests[queue[following][1]].size_bytes * 10**9, 0, 0, 0, "end", following))
            following, busy = following + 1, True
    c = CHECKPOINTS - 2
    first = c * len(requests)
    shift = c * period
    return [(begins[first + n] - shift, ends[first + n] - shift) for n in range(len(requests))], sorted(set(late))


def standing_still(problem: Problem, position: int, time_ns: int) -> Problem:
    """One checkpoint's k iterations as one, in which training stands still at an unrolled position: one step more.

    Windows stay what they are: a tensor's first write is that of the first iteration, its last that of the last one.
    Nothing is allocated meanwhile: what is resident then is so at the steps before and after it.
    """
    times, resident = problem.time_ns * problem.interval, problem.resident_bytes * problem.interval
    at = position % len(times) or len(times)  # what is at position 0 is at the end of the iterations before, too

    def moved(tensor: StateTensor) -> StateTensor:
        first, last = tensor.first_write, tensor.last_write + len(times) - len(problem.time_ns)
        return replace(tensor, first_write=first + (first > at), last_write=last + (last > at))

    return replace(
        problem,
        time_ns=(*times[:at], time_ns, *times[at:]),
        resident_bytes=(*resident[:at], min(resident[at - 1], resident[at % len(times)]), *resident[at:]),
        state=tuple(moved(tensor) for tensor in problem.state),
        interval=1,
    )


def peak_bytes(problem: Problem, holds: Sequence[tuple[int, int, int]]) -> int:
    """Largest of resident + snapshots, from (first step, last step, bytes) of each snapshot, step by step."""
    period = problem.interval * len(problem.time_ns)
    peak = 0
    for step in range(1, period + 1):
        held = sum(
            size_bytes
            for first, last, size_bytes in holds
            for other in range(first, last + 1)
            if (other - step) % period == 0
        )
        peak = max(peak, problem.resident_bytes[(step - 1) % len(problem.time_ns)] + held)
    return peak


def step_of(problem: Problem, tick: int) -> int:
    """The least step whose end is after a tick, by counting."""
    step = -CHECKPOINTS * problem.interval * len(problem.time_ns)
    while clock(problem, step) <= tick:
        step += 1
    return step


def fluid_bound(problem: Problem) -> int:
    """Largest of resident + bytes left past their deadlines, step by step, the earliest deadline served first."""
    period = problem.interval * len(problem.time_ns)
    waiting: list[list[int]] = []  # [deadline, ticks], of all checkpoints so far
    bound = 0
    for position in range(-len(problem.time_ns), (CHECKPOINTS - 1) * period):
        for state in problem.state:
            for checkpoint in range(CHECKPOINTS):
                if state.last_write - len(problem.time_ns) + checkpoint * period == position:
                    waiting.append([state.first_write - 1 + checkpoint * period, state.size_bytes * 10**9])
        if position >= (CHECKPOINTS - 2) * period:
            left = sum(ticks for deadline, ticks in waiting if deadline <= position)
            bound = max(bound, problem.resident_bytes[position % len(problem.time_ns)] + -(-left // 10**9))
        room = clock(problem, position + 1) - clock(problem, position)
        for one in sorted(waiting):
            served = min(room, one[1])
            one[1] -= served
            room -= served
        waiting = [one for one in sorted(waiting) if one[1]]
    return bound
