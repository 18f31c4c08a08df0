"""Formulation `direct` with streaming transfers: solved by arithmetic, with no solver at all (docs/model.md)."""

from __future__ import annotations

from checkflow.plan import (
    TICKS_PER_BYTE,
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
from checkflow.plan.infeasible import Construction, as_planned, infeasible, keeps_limit, too_large
from checkflow.plan.streaming.place import Placement, place
from checkflow.plan.timeline.fluid import earliest_deadline_first, link_carries, lower_bound_bytes
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.units import format_bytes

NO_SOLVER = SolverRun("none", "the plan meets the bound that the earliest deadline first gives")
PRECISION = 10**6  # of what an infeasible answer says would do


def plan_streaming(problem: Problem) -> Plan | Infeasible:
    """The plan of least peak, or why there is none: bandwidth, or a memory limit that it does not keep."""
    search = Construction(_possible, construct_streaming, PRECISION)
    if not link_carries(TimeGrid.of(problem)):
        return infeasible(problem, Reason.BANDWIDTH, _too_slow(problem), search)
    plan = _plan(problem)
    if keeps_limit(problem, plan, as_planned):
        return plan
    return infeasible(problem, Reason.MEMORY, too_large(problem, plan, as_planned), search)


def construct_streaming(problem: Problem) -> Plan | None:
    """The plan of least peak, if the link carries the state and the plan keeps to the memory limit."""
    if not _possible(problem):
        return None
    plan = _plan(problem)
    return plan if keeps_limit(problem, plan, as_planned) else None


def _plan(problem: Problem) -> Plan:
    grid = TimeGrid.of(problem)
    placement = place(grid)
    return Plan(
        formulation=Formulation.DIRECT,
        transfers_kind=Transfers.STREAMING,
        transfers=transfers_of(grid, placement),
        peak_bytes=placement.peak_bytes,
        lower_bound_bytes=placement.lower_bound_bytes,
        proven_by=ProvenBy.BOUND,
        solver=NO_SOLVER,
    )


def _possible(problem: Problem) -> bool:
    """Whether the link and the bound leave room for a plan, which costs less to tell than to make one."""
    grid, limit = TimeGrid.of(problem), problem.memory_limit_bytes
    if not link_carries(grid):
        return False
    return limit is None or lower_bound_bytes(grid, earliest_deadline_first(grid)) <= limit


def _too_slow(problem: Problem) -> str:
    if not problem.iteration_time_ns:
        return "the iteration takes no time, so no link carries a byte"
    moves_bytes = problem.interval * problem.clock(problem.steps) // TICKS_PER_BYTE
    what, when = "state", "from one checkpoint to the next"
    if problem.lanes > 1:
        what, when = "state and gradients", f"in the {problem.lanes} iterations that have parts of it"
    return (
        f"{format_bytes(problem.state_bytes)} of {what} do not fit the link, which moves {format_bytes(moves_bytes)} "
        f"{when}"
    )


def transfers_of(grid: TimeGrid, placement: Placement) -> tuple[Transfer, ...]:
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
