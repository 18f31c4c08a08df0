"""Formulation `direct` with streaming transfers: solved by arithmetic, with no solver at all (docs/model.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from checkflow.link.fluid import link_carries
from checkflow.link.grid import TICKS_PER_BYTE, Grid
from checkflow.link.place import Placement, place
from checkflow.plan import (
    Formulation,
    Infeasible,
    Plan,
    Problem,
    ProvenBy,
    Reason,
    SolverRun,
    Transfer,
    Transfers,
)

NO_SOLVER = SolverRun("none", "the plan meets the bound that the earliest deadline first gives")


def plan_streaming(problem: Problem) -> Plan | Infeasible:
    """The plan of least peak, or why there is none: bandwidth, or a memory limit below the bound."""
    grid = Grid.everywhere(problem)
    if not link_carries(grid):
        return _too_slow(problem)
    placement = place(grid)
    limit = problem.memory_limit_bytes
    if limit is not None and placement.peak_bytes > limit:
        return too_large(problem, placement.peak_bytes, limit)
    return Plan(
        formulation=Formulation.DIRECT,
        transfers_kind=Transfers.STREAMING,
        transfers=transfers_of(grid, placement),
        peak_bytes=placement.peak_bytes,
        lower_bound_bytes=placement.lower_bound_bytes,
        proven_by=ProvenBy.BOUND,
        solver=NO_SOLVER,
    )


def transfers_of(grid: Grid, placement: Placement) -> tuple[Transfer, ...]:
    """The placement as transfers, in link order."""
    return tuple(
        Transfer(
            chunk=part.chunk,
            snapshot=None if part.created is None else grid.position(part.created),
            start=grid.step_of(part.begin_ticks + 1),
            finish=grid.step_of(part.end_ticks),
        )
        for part in placement.placed
    )


def _snapshot_bytes(placement: Placement) -> int:
    return sum(part.chunk.size_bytes for part in placement.placed if part.created is not None)


def _too_slow(problem: Problem) -> Infeasible:
    """More bytes than the link moves from one checkpoint to the next."""
    if not problem.iteration_time_ns:
        return Infeasible(Reason.BANDWIDTH, "the iteration takes no time, so no link carries a byte", None, None, None)
    work = problem.state_bytes * TICKS_PER_BYTE
    needed = -(-work // (problem.interval * problem.iteration_time_ns))
    smallest = -(-work // problem.clock(problem.steps))
    relaxed = place(Grid.everywhere(replace(problem, interval=smallest)))
    return Infeasible(
        reason=Reason.BANDWIDTH,
        detail=(
            f"{problem.state_bytes} bytes of state do not fit the link, which moves "
            f"{problem.interval * problem.clock(problem.steps) // TICKS_PER_BYTE} from one checkpoint to the next"
        ),
        needed_bandwidth_bytes_per_s=needed,
        smallest_interval=smallest,
        snapshot_bytes_at_that_interval=_snapshot_bytes(relaxed),
    )


def too_large(
    problem: Problem, least_bytes: int, limit_bytes: int, grid_of: Callable[[Problem], Grid] = Grid.everywhere
) -> Infeasible:
    """The answer where every plan on a grid is over the limit; `least_bytes` is what the best one needs."""
    unlimited = replace(problem, memory_limit_bytes=None)
    longer = replace(unlimited, interval=problem.interval + 1)
    later = place(grid_of(longer))
    helps = later.peak_bytes <= limit_bytes
    return Infeasible(
        reason=Reason.MEMORY,
        detail=f"the least peak of any plan is {least_bytes} bytes and the limit {limit_bytes}",
        needed_bandwidth_bytes_per_s=_bandwidth_for(unlimited, limit_bytes, grid_of),
        smallest_interval=longer.interval if helps else None,
        snapshot_bytes_at_that_interval=_snapshot_bytes(later) if helps else None,
    )


def _bandwidth_for(problem: Problem, limit_bytes: int, grid_of: Callable[[Problem], Grid]) -> int | None:
    """Least bandwidth whose peak keeps to the limit, by bisection; None where training alone does not."""
    if problem.training_peak_bytes > limit_bytes:
        return None

    def fits(bandwidth: int) -> bool:
        return place(grid_of(replace(problem, bandwidth_bytes_per_s=bandwidth))).peak_bytes <= limit_bytes

    low, high = problem.bandwidth_bytes_per_s, problem.bandwidth_bytes_per_s * 2
    while not fits(high):
        low, high = high, high * 2
        if high > 10**18:  # a tensor without any window but the iteration's end is always snapshot
            return None
    while high - low > max(1, high // 10**6):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
