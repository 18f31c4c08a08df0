"""What a policy answers with, and the parts of which the baselines' answers are made.

A baseline's rule is said by its problem: training that stands still is a step, and a tensor that is not read as early
as it could be has a narrower window. So verify_plan checks every policy by the same page, docs/model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkflow.plan import (
    TICKS_PER_BYTE,
    Chunk,
    Formulation,
    Infeasible,
    Plan,
    Problem,
    ProvenBy,
    Reason,
    SolverRun,
    StateTensor,
    Transfer,
    Transfers,
)
from checkflow.plan.timeline.grid import Grid
from checkflow.units import size_and_excess

RULE = SolverRun("none", "the policy's rule leaves nothing to choose")


@dataclass(frozen=True)
class Planned:
    """What a policy does with a problem."""

    problem: Problem  # the iteration as it runs under the policy: where training stands still, there is a step for it
    plan: Plan  # verify_plan(plan, problem) accepts it
    peak_bytes: int  # what the policy needs of GPU memory; at least plan.peak_bytes
    pause_ns: int  # training stands still for so long for each checkpoint


def duration_ns(ticks: int, problem: Problem) -> int:
    """How long the link takes for so many ticks of 1e-9 byte, in whole ns; 0 for less than none."""
    return max(0, -(-ticks // problem.bandwidth_bytes_per_s))


def read_after_iteration(problem: Problem) -> Problem:
    """The same problem where nothing is read before the iteration's end: every window opens there, if not later."""
    return replace(problem, state=tuple(replace(tensor, last_write=problem.steps) for tensor in problem.state))


def paused(problem: Problem, pause_ns: int, position: int) -> Problem:
    """One checkpoint's k iterations as one, in which training stands still at a position, 0..kT, for so long.

    Windows stay what they are: a tensor's first write is that of the first iteration, its last that of the last one.
    Nothing is allocated during a pause: what is resident then is so at the steps before and after it, so that the
    lesser of the two is enough. Without a pause the problem is returned as it is.
    """
    if not pause_ns:
        return problem
    times, resident = problem.time_ns * problem.interval, problem.resident_bytes * problem.interval
    resident_then = min(resident[position - 1], resident[position % len(resident)])
    before_last = (problem.interval - 1) * problem.steps

    def moved(tensor: StateTensor) -> StateTensor:
        first, last = tensor.first_write, tensor.last_write + before_last
        return replace(tensor, first_write=first + (first > position), last_write=last + (last > position))

    return replace(
        problem,
        time_ns=(*times[:position], pause_ns, *times[position:]),
        resident_bytes=(*resident[:position], resident_then, *resident[position:]),
        state=tuple(moved(tensor) for tensor in problem.state),
        interval=1,
    )


def by_first_write(problem: Problem) -> list[int]:
    """Indices into Problem.state: what is overwritten first, first."""
    return sorted(range(len(problem.state)), key=lambda index: problem.state[index].first_write)


def back_to_back(problem: Problem, begin: int, snapshot: int | None) -> tuple[Transfer, ...]:
    """The whole state sent without a break from an unrolled position on, at which the link has to be idle."""
    grid = Grid.everywhere(problem)
    size_limit = problem.chunk_bytes and problem.chunk_bytes - problem.chunk_bytes % problem.granule_bytes
    transfers, now = [], problem.clock(begin)
    for index in by_first_write(problem):
        size_bytes = problem.state[index].size_bytes
        for offset in range(0, size_bytes, size_limit or size_bytes):
            chunk = Chunk(index, offset, min(size_limit or size_bytes, size_bytes - offset))
            end = now + chunk.size_bytes * TICKS_PER_BYTE
            transfers.append(Transfer(chunk, snapshot, grid.step_of(now + 1), grid.step_of(end)))
            now = end
    return tuple(transfers)


def direct(problem: Problem, begin: int) -> Plan:
    """The whole state sent from the live tensors, each before its deadline: no byte is added."""
    training = problem.training_peak_bytes
    return by_rule(back_to_back(problem, begin, snapshot=None), training, training)


def by_rule(transfers: tuple[Transfer, ...], peak_bytes: int, lower_bound_bytes: int) -> Plan:
    """A streaming plan that a policy makes without a choice. The bound is that of all plans for the same problem."""
    return Plan(
        formulation=Formulation.DIRECT,
        transfers_kind=Transfers.STREAMING,
        transfers=transfers,
        peak_bytes=peak_bytes,
        lower_bound_bytes=lower_bound_bytes,
        proven_by=ProvenBy.BOUND,
        solver=RULE,
    )


def within_limit(planned: Planned, problem: Problem, needed_bandwidth_bytes_per_s: int | None) -> Planned | Infeasible:
    """The answer, unless it needs more than the problem's memory limit; no interval helps against that."""
    limit = problem.memory_limit_bytes
    if limit is None or planned.peak_bytes <= limit:
        return planned
    return Infeasible(
        reason=Reason.MEMORY,
        detail=f"this policy needs {size_and_excess(planned.peak_bytes, limit)}",
        needed_bandwidth_bytes_per_s=needed_bandwidth_bytes_per_s,
        smallest_interval=None,
        snapshot_bytes_at_that_interval=None,
    )
