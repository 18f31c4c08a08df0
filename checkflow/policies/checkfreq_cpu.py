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

from checkflow.graph import Role
from checkflow.plan import TICKS_PER_BYTE, Infeasible, Problem
from checkflow.policies.planned import (
    Planned,
    by_first_write,
    direct,
    duration_ns,
    paused,
    read_after_iteration,
    within_limit,
)


def plan(problem: Problem) -> Planned | Infeasible:
    """A pause, at the guard, for what has not left by then; no byte of memory.

    Infeasible where the memory limit is below what training alone needs.
    """
    guard = _guard(problem)
    left = 0 if guard is None else problem.state_bytes * TICKS_PER_BYTE - problem.clock(guard)
    pause_ns = duration_ns(left, problem)
    runs = paused(read_after_iteration(problem), pause_ns, guard or 0)
    sent = direct(runs, begin=0)
    return within_limit(Planned(runs, sent, sent.peak_bytes, pause_ns), problem, None)


def _guard(problem: Problem) -> int | None:
    """The position at which training waits until all has left; None if all is gone before any write that needs it."""
    sent = 0
    for index in by_first_write(problem):
        tensor = problem.state[index]
        sent += tensor.size_bytes * TICKS_PER_BYTE
        before = tensor.first_write - 1
        if tensor.role is not Role.BUFFER or sent > problem.clock(before):
            return before
    return None
