"""CheckFreq (FAST '21) with GPU snapshots: the whole state is copied in GPU memory, and leaves from the copy.

Section 4.3.1: after the weight update snapshot() copies the model's state, in GPU memory where there is room (a);
persist() then moves the copy to the host and to disk in the background. There is one checkpoint under way at a time:
when the next one is due, training waits for the one before. The paper doesn't say when the copy's memory is freed.

Assumed in its favour:
* The copy in GPU memory takes no time (its Algorithm 1 counts T_g for it).
* It is freed as soon as all of it is on the host, and the next checkpoint waits for that alone, not for the disk.
* The transfer has the link's full bandwidth, and begins at once.
* State that the iteration never writes is not in a Problem, and so neither copied nor held with each checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from checkflow.plan import TICKS_PER_BYTE, Infeasible, Problem
from checkflow.plan.timeline.fluid import earliest_deadline_first, lower_bound_bytes
from checkflow.plan.timeline.grid import Grid
from checkflow.policies.planned import Planned, back_to_back, by_rule, duration_ns, paused, within_limit


def plan(problem: Problem) -> Planned | Infeasible:
    """A copy of the state at the iteration's end, and a pause there for what the link cannot carry in k iterations.

    Infeasible where that needs more than the memory limit (CheckFreq then goes on as checkfreq_cpu does).
    """
    return within_limit(_planned(problem), problem, _bandwidth_for(problem))


def unlimited(problem: Problem) -> Planned:
    """The same without a memory limit, for what CheckFreq would need."""
    return _planned(replace(problem, memory_limit_bytes=None))


def _planned(problem: Problem) -> Planned:
    work = problem.state_bytes * TICKS_PER_BYTE
    pause_ns = duration_ns(work - problem.clock(problem.interval * problem.steps), problem)
    runs = paused(problem, pause_ns, problem.interval * problem.steps)
    grid = Grid.everywhere(runs)
    transfers = back_to_back(runs, begin=0, snapshot=0)
    held = [(0, grid.at_or_after(transfer.finish), transfer.chunk.size_bytes) for transfer in transfers]
    gone = max((released for _, released, _ in held), default=0)
    needed = max(grid.memory_bytes([(0, gone, problem.state_bytes)]))
    bound = lower_bound_bytes(grid, earliest_deadline_first(grid))
    return Planned(runs, by_rule(transfers, max(grid.memory_bytes(held)), bound), needed, pause_ns)


def _bandwidth_for(problem: Problem) -> int | None:
    """The least bandwidth at which the copy is gone before the first step that has no room for it; None: none helps."""
    limit = problem.memory_limit_bytes
    if limit is None or problem.training_peak_bytes > limit:
        return None
    fullest = list(accumulate(problem.resident_bytes, max))
    roomy = bisect_right(fullest, limit - problem.state_bytes)  # that many first steps have room
    time_ns = sum(problem.time_ns[:roomy])
    return -(-problem.state_bytes * TICKS_PER_BYTE // time_ns) if time_ns else None
