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

from checkflow.graph import Graph
from checkflow.plan import TICKS_PER_BYTE, Infeasible, Problem, on_anchors
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.policies.rule import Asked, Ruled, scheduled, until_arrived, whole_state, within_limit
from checkflow.schedule import Schedule


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The rule on the graph's anchors."""
    problem = on_anchors(problem, graph)
    return scheduled("checkfreq", rule(problem), problem, graph, asked)


def rule(problem: Problem) -> Ruled | Infeasible:
    """A copy of the state at the iteration's end, and a pause there for what the link cannot carry in k iterations.

    Infeasible where that needs more than the memory limit (CheckFreq then goes on as checkfreq_cpu does).
    """
    return within_limit(_ruled(problem), problem, _bandwidth_for(problem))


def at_best(problem: Problem) -> Ruled:
    """What CheckFreq would need where its copy could be freed between any two operators, whatever the limit."""
    return _ruled(replace(problem, anchors=None, memory_limit_bytes=None))


def _ruled(problem: Problem) -> Ruled:
    grid = TimeGrid.of(problem)
    if not problem.state:
        return Ruled((), None, problem.training_peak_bytes)
    gone = min(grid.from_clock(problem.state_bytes * TICKS_PER_BYTE), grid.period_cells)
    return Ruled(
        acts=whole_state(problem, created=0, released=gone),
        pause=until_arrived(grid, grid.period_cells),
        peak_bytes=max(grid.memory_bytes([(0, gone, problem.state_bytes)])),
    )


def _bandwidth_for(problem: Problem) -> int | None:
    """The least bandwidth at which the copy is gone before the first cell that has no room for it; None: none helps."""
    limit, grid = problem.memory_limit_bytes, TimeGrid.of(problem)
    if limit is None or problem.training_peak_bytes > limit:
        return None
    fullest = list(accumulate(grid.resident_bytes, max))
    roomy = bisect_right(fullest, limit - problem.state_bytes)  # that many first cells have room
    time_ns = sum(problem.time_ns[: grid.position(roomy)])
    return -(-problem.state_bytes * TICKS_PER_BYTE // time_ns) if time_ns else None
