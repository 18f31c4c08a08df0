"""Why no packed plan exists, as plan.Infeasible, with the least bandwidth and interval that would make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from checkflow.link.fluid import earliest_deadline_first
from checkflow.link.grid import Grid
from checkflow.plan import Formulation, Infeasible, Problem, Reason, StateTensor
from checkflow.solve.bounds import least_bandwidth, least_interval, least_peak_bytes, link_fits
from checkflow.solve.constructive import construct
from checkflow.solve.packed import TICKS_PER_BYTE, whole_chunks


def from_deadline(tensor: StateTensor) -> Infeasible:
    """The paper's model allows no snapshot before step 1, so nothing helps."""
    return Infeasible(
        Reason.DEADLINE,
        f"{tensor.name} is overwritten at step 1, before the paper's model allows a snapshot; use --formulation direct",
        needed_bandwidth_bytes_per_s=None,
        smallest_interval=None,
        snapshot_bytes_at_that_interval=None,
    )


def from_bandwidth(problem: Problem, formulation: Formulation) -> Infeasible:
    """More bytes than the steps can carry, however they are cut. Both figures are exact for that."""
    return _infeasible(
        problem,
        formulation,
        Reason.BANDWIDTH,
        f"{problem.state_bytes} bytes of state do not fit the steps from one checkpoint to the next, however they are "
        "cut",
        lambda changed: link_fits(changed, formulation),
    )


def from_chunk(problem: Problem, formulation: Formulation, per_size_bytes: int) -> Infeasible:
    """The bytes fit but not these chunks. The figures are the least for which a plan could be constructed."""

    def fits(changed: Problem) -> bool:
        if not link_fits(changed, formulation):
            return False
        chunks = whole_chunks(changed, per_size_bytes)
        return construct(changed, chunks, formulation, least_peak_bytes(changed, formulation)) is not None

    return _infeasible(
        problem,
        formulation,
        Reason.CHUNK,
        f"{problem.state_bytes} bytes of state fit the link but cannot be packed into steps in chunks of "
        f"{per_size_bytes} bytes; the figures are those for which a plan was constructed",
        fits,
    )


def from_memory(problem: Problem, formulation: Formulation, least_bytes: int, of_what: str) -> Infeasible:
    """Every plan is over the limit. The figures are those at which the bound is not."""
    limit = problem.memory_limit_bytes
    assert limit is not None

    def fits(changed: Problem) -> bool:
        return link_fits(changed, formulation) and least_peak_bytes(changed, formulation) <= limit

    detail = f"{of_what} the least peak is {least_bytes} bytes and the limit {limit}; the figures are by the bound"
    if problem.training_peak_bytes > limit:
        return Infeasible(Reason.MEMORY, detail, None, None, None)
    return _infeasible(problem, formulation, Reason.MEMORY, detail, fits)


def _infeasible(
    problem: Problem, formulation: Formulation, reason: Reason, detail: str, fits: Callable[[Problem], bool]
) -> Infeasible:
    interval = least_interval(problem, fits)
    return Infeasible(
        reason,
        detail,
        needed_bandwidth_bytes_per_s=least_bandwidth(problem, fits),
        smallest_interval=interval,
        snapshot_bytes_at_that_interval=(
            None if interval is None else snapshot_bytes(replace(problem, interval=interval), formulation)
        ),
    )


def snapshot_bytes(problem: Problem, formulation: Formulation) -> int:
    """Fewest bytes that any plan snapshots: in the paper's model all; in `direct` those that cannot leave in time."""
    if formulation is not Formulation.DIRECT:
        return problem.state_bytes
    grid = Grid.everywhere(problem)
    late = 0
    for piece in earliest_deadline_first(grid):
        deadline = grid.clock(grid.window(problem.state[piece.state])[1])
        late += max(0, piece.end_ticks - max(piece.begin_ticks, deadline))
    return -(-late // TICKS_PER_BYTE)
