"""CheckFreq (FAST '21) with CPU snapshots: the live state is copied to the host while the next iteration computes.

Section 4.3.1: snapshot() begins after the weight update and runs beside the next iteration's forward and backward; if
it is not done by that iteration's weight update, the iteration waits until all of it is. Section 4.4: a semaphore
around the update does this, so there is one guard for the whole state. Section 4.3.1, (b): the mode for GPUs without
room for a copy of the state.

Assumed in its favour:
* The copy has the link's full bandwidth, and costs the computation nothing. persist(), the writing to disk, holds
  nothing up (the paper lets the next checkpoint wait for it).
* Buffers, such as batch norm's statistics, are overwritten before the update, where the paper has no guard. Here what
  is overwritten first leaves first; only where a buffer would be overwritten before it has left, the guard stands
  before that write instead of before the update.
* State that the iteration never writes is not in a Problem, and so not copied again with each checkpoint.
"""

from __future__ import annotations

from checkflow.graph import Graph, Role
from checkflow.plan import TICKS_PER_BYTE, Infeasible, Problem, on_anchors
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.policies.rule import (
    Asked,
    Ruled,
    by_first_write,
    scheduled,
    until_arrived,
    whole_state,
    within_limit,
)
from checkflow.schedule import Schedule


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The rule on the graph's anchors."""
    problem = on_anchors(problem, graph)
    return scheduled("checkfreq_cpu", rule(problem), problem, graph, asked)


def rule(problem: Problem) -> Ruled | Infeasible:
    """A pause, at the guard, for what has not left by then; no byte of memory.

    Infeasible where the memory limit is below what training alone needs.
    """
    grid = TimeGrid.of(problem)
    guard = _guard(grid)
    pause = None if guard is None else until_arrived(grid, guard)
    return within_limit(Ruled(whole_state(problem), pause, problem.training_peak_bytes), problem, None)


def _guard(grid: TimeGrid) -> int | None:
    """The ordinal at which training waits until all has left; None if all is gone before any write that needs it."""
    sent = 0
    for index in by_first_write(grid.problem):
        tensor = grid.problem.state[index]
        sent += tensor.size_bytes * TICKS_PER_BYTE
        before = grid.at_or_before(tensor.first_write - 1)
        if tensor.role is not Role.BUFFER or sent > grid.clock(before):
            return before
    return None
