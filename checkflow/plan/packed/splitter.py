"""Packed plans: Algorithm 1 of the paper, with an end.

Reasons are tried in the order of plan.Reason. A write at step 1 and bytes beyond what the link can carry are settled
first, by arithmetic that holds for every chunk size. Then chunks of one size are packed; where that is impossible, or
the least peak is over the memory limit, they are halved. The size at least halves from round to round and never goes
below `smallest_chunk_bytes`, where the answer is final: at most log2(first / smallest) + 1 rounds.

A lower bound proven by `bound` holds for every chunking; one proven by `milp` holds for the chunks of the plan, since
an integer program has to be given its chunks.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from checkflow.errors import SolverError
from checkflow.plan import Formulation, Infeasible, Plan, Problem, Reason
from checkflow.plan.infeasible import Construction, Needs, as_planned, from_deadline, infeasible, keeps_limit, too_large
from checkflow.plan.packed.bounds import chunks_can_fit, least_peak_bytes, link_fits, sizes_can_fit
from checkflow.plan.packed.constructive import construct, construct_within
from checkflow.plan.packed.packing import NO_SOLVER, Unpacked, pack, plan_of
from checkflow.plan.packed.steps import classes_of, whole_chunks
from checkflow.units import format_bytes, size_and_excess

FIRST_CHUNK_BYTES = 16 << 20
SMALLEST_CHUNK_BYTES = 16 << 10
SMALLEST_PART = 64  # of the largest tensor, where that is less
PRECISION = 200  # of what an infeasible answer says would do


def plan_packed(
    problem: Problem,
    formulation: Formulation,
    *,
    needs: Needs = as_planned,
    solver: str = "auto",
    time_limit_s: float = 300.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan | Infeasible:
    """The packed plan of least peak, or why there is none.

    A solver that runs out of time leaves the best plan found, with its gap. Raises SolverError where the solver cannot
    run, or where time runs out with neither a plan within the memory limit nor a proof that there is none.
    """
    deadline = time.monotonic() + time_limit_s
    if formulation is not Formulation.DIRECT:
        early = next((tensor for tensor in problem.state if tensor.first_write == 1), None)
        if early is not None:
            return from_deadline(early)
    search = Construction(
        lambda changed: _possible(changed, formulation),
        lambda changed: construct_packed(changed, formulation, needs),
        PRECISION,
    )
    if not link_fits(problem, formulation):
        detail = (
            f"{format_bytes(problem.state_bytes)} of state do not fit the steps from one checkpoint to the next, "
            "however they are cut"
        )
        return infeasible(problem, Reason.BANDWIDTH, detail, search)
    bound, limit = least_peak_bytes(problem, formulation), problem.memory_limit_bytes
    if limit is not None and bound > limit:
        detail = f"however the state is cut, no plan needs less than {size_and_excess(bound, limit)}"
        return infeasible(problem, Reason.MEMORY, detail, search)
    result: Plan | Unpacked = Unpacked.UNDECIDED
    per_size = 0
    for per_size in halvings(problem, problem.chunk_bytes or best_chunk_bytes(problem, formulation, bound)):
        chunks = whole_chunks(problem, per_size)
        progress(f"{len(chunks)} chunks of at most {format_bytes(per_size)}")
        left_s = deadline - time.monotonic()
        result = pack(problem, chunks, formulation, bound, solver=solver, time_limit_s=left_s, progress=progress)
        if isinstance(result, Plan) and keeps_limit(problem, result, needs):
            return result
    if limit is not None and (last := construct_packed(problem, formulation, needs)) is not None:
        return replace(last, lower_bound_bytes=bound)  # in chunks passed over for others, whose execution needs more
    if result is Unpacked.IMPOSSIBLE:
        detail = (
            f"{format_bytes(problem.state_bytes)} of state fit the link but cannot be packed into steps in chunks of "
            f"{format_bytes(per_size)}"
        )
        return infeasible(problem, Reason.CHUNK, detail, search)
    if isinstance(result, Plan) and limit is not None:
        if result.lower_bound_bytes > limit:
            needed = size_and_excess(result.lower_bound_bytes, limit)
            detail = f"in chunks of {format_bytes(per_size)} no plan needs less than {needed}"
            return infeasible(problem, Reason.MEMORY, detail, search)
        if result.peak_bytes <= limit:
            return infeasible(problem, Reason.MEMORY, too_large(problem, result, needs), search)
    raise SolverError(
        f"solver {solver}: {time_limit_s:g} s passed with neither a plan nor a proof that there is none; give it more"
    )


def construct_packed(problem: Problem, formulation: Formulation, needs: Needs = as_planned) -> Plan | None:
    """A packed plan that keeps to the memory limit, constructed without a solver; None where none comes out.

    Of the paper's model as of `compact`: the plans are the same.
    """
    if not _possible(problem, formulation):
        return None
    within = problem.memory_limit_bytes or problem.training_peak_bytes + problem.state_bytes
    sizes = list(halvings(problem, problem.chunk_bytes or FIRST_CHUNK_BYTES))
    if formulation is Formulation.DIRECT and problem.chunk_bytes is None:
        first = best_chunk_bytes(problem, formulation, least_peak_bytes(problem, formulation))
        sizes.sort(key=lambda size: (size > first, -size))  # as plan_packed tries them, then the rest
    for per_size in sizes:
        chunks = whole_chunks(problem, per_size)
        if formulation is Formulation.DIRECT:
            found = construct(problem, chunks, formulation, 0)
        else:
            found = construct_within(problem, classes_of(problem, chunks, formulation), within)
        if found is not None:
            bound = problem.training_peak_bytes
            plan = plan_of(formulation, found, bound, bound, NO_SOLVER, found)
            if keeps_limit(problem, plan, needs):
                return plan
    return None


def _possible(problem: Problem, formulation: Formulation) -> bool:
    """False where arithmetic says that no plan exists."""
    if formulation is not Formulation.DIRECT and any(tensor.first_write == 1 for tensor in problem.state):
        return False
    smallest = min(smallest_chunk_bytes(problem), problem.chunk_bytes or sys.maxsize)
    number_of: Counter[int] = Counter()
    for tensor in problem.state:
        number_of[smallest] += tensor.size_bytes // smallest
        number_of[tensor.size_bytes % smallest] += 1
    del number_of[0]
    if not link_fits(problem, formulation) or not sizes_can_fit(problem, number_of, formulation):
        return False
    limit = problem.memory_limit_bytes
    return limit is None or least_peak_bytes(problem, formulation) <= limit


def smallest_chunk_bytes(problem: Problem) -> int:
    """Where splitting ends: a multiple of the granule, 16 KiB unless all tensors are small."""
    largest = max((tensor.size_bytes for tensor in problem.state), default=1)
    return _granules(problem, min(SMALLEST_CHUNK_BYTES, largest // SMALLEST_PART))


def halvings(problem: Problem, first_bytes: int) -> Iterator[int]:
    """Chunk sizes to try, from the first to the smallest; only the first is not a multiple of the granule."""
    largest = max((tensor.size_bytes for tensor in problem.state), default=1)
    smallest = smallest_chunk_bytes(problem)
    size = min(first_bytes, largest)
    yield size
    while size > smallest:
        size = max(smallest, _granules(problem, size // 2, up=False))
        yield size


def best_chunk_bytes(problem: Problem, formulation: Formulation, bound_bytes: int) -> int:
    """The largest power of two up to 16 MiB with which a constructed plan meets the bound, or comes nearest to it.

    The same for `paper` and `compact`, so that their plans can be compared.
    """
    like = Formulation.COMPACT if formulation is Formulation.PAPER else formulation
    best, best_peak = 0, 0
    for size in halvings(problem, FIRST_CHUNK_BYTES):
        chunks = whole_chunks(problem, size)
        if not chunks_can_fit(problem, chunks, like):
            continue
        found = construct(problem, chunks, like, bound_bytes)
        if found is not None and (not best or found.peak_bytes < best_peak):
            best, best_peak = size, found.peak_bytes
        if best and best_peak == bound_bytes:
            break
    return best or FIRST_CHUNK_BYTES


def _granules(problem: Problem, size_bytes: int, *, up: bool = True) -> int:
    granule = problem.granule_bytes
    return max(1, -(-size_bytes // granule) if up else size_bytes // granule) * granule
