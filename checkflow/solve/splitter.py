"""Packed plans: Algorithm 1 of the paper, with an end.

Reasons are tried in the order of plan.Reason. A write at step 1 and bytes beyond what the link can carry are settled
first, by arithmetic that holds for every chunk size. Then chunks of one size are packed; where that is impossible, or
the least peak is over the memory limit, they are halved. The size at least halves from round to round and never goes
below `smallest_chunk_bytes`, where the answer is final: at most log2(first / smallest) + 1 rounds.

A lower bound proven by `bound` holds for every chunking; one proven by `milp` holds for the chunks of the plan, since
an integer program has to be given its chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from checkflow.errors import SolverError
from checkflow.plan import Formulation, Infeasible, Plan, Problem
from checkflow.solve import ways_out
from checkflow.solve.bounds import chunks_can_fit, least_peak_bytes, link_fits
from checkflow.solve.constructive import construct
from checkflow.solve.packed import whole_chunks
from checkflow.solve.packing import Unpacked, pack

FIRST_CHUNK_BYTES = 16 << 20
SMALLEST_CHUNK_BYTES = 16 << 10
SMALLEST_PART = 64  # of the largest tensor, where that is less


def plan_packed(
    problem: Problem,
    formulation: Formulation,
    *,
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
            return ways_out.from_deadline(early)
    if not link_fits(problem, formulation):
        return ways_out.from_bandwidth(problem, formulation)
    bound, limit = least_peak_bytes(problem, formulation), problem.memory_limit_bytes
    if limit is not None and bound > limit:
        return ways_out.from_memory(problem, formulation, bound, "however the state is cut,")
    result: Plan | Unpacked = Unpacked.UNDECIDED
    per_size = 0
    for per_size in halvings(problem, problem.chunk_bytes or best_chunk_bytes(problem, formulation, bound)):
        chunks = whole_chunks(problem, per_size)
        progress(f"{len(chunks)} chunks of at most {per_size} bytes")
        left_s = deadline - time.monotonic()
        result = pack(problem, chunks, formulation, bound, solver=solver, time_limit_s=left_s, progress=progress)
        if isinstance(result, Plan) and (limit is None or result.peak_bytes <= limit):
            return result
    if result is Unpacked.IMPOSSIBLE:
        return ways_out.from_chunk(problem, formulation, per_size)
    if isinstance(result, Plan) and limit is not None and result.lower_bound_bytes > limit:
        return ways_out.from_memory(problem, formulation, result.lower_bound_bytes, f"in chunks of {per_size} bytes")
    raise SolverError(
        f"solver {solver}: {time_limit_s:g} s passed with neither a plan nor a proof that there is none; give it more"
    )


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
