"""What the packed formulations share: chunks, capacities of steps, occupancy, and the exact peak of a set of transfers.

Steps are unrolled; arrays over the period hold folded steps 1..kT at index 0..kT-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from checkflow.plan import TICKS_PER_BYTE, Chunk, Formulation, Problem, Transfer
from checkflow.plan.packed.program import Floats, Integers, Program


@dataclass(frozen=True, slots=True)
class ChunkClass:
    """Interchangeable chunks: equal size, and the tensors' first and last writes equal."""

    size_bytes: int
    first_write: int  # u
    last_write: int  # 0 in the paper's semantics, where it plays no part
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Model:
    """An integer program over given chunks, and the way between its columns and transfers.

    The objective is (peak - base_bytes) / unit_bytes.
    """

    program: Program
    base_bytes: int
    unit_bytes: int
    decode: Callable[[Floats], tuple[Transfer, ...]]
    encode: Callable[
        [tuple[Transfer, ...]], Floats
    ]  # a warm start; its transfers are as the latest creations make them

    def bytes_of(self, objective: float) -> int:
        """A bound on the objective as a bound on the peak, rounded up but for the solver's tolerance of 1e-6 units."""
        if objective == -math.inf:
            return self.base_bytes
        return self.base_bytes + max(0, math.ceil(objective * self.unit_bytes - max(1e-3, 2e-6 * self.unit_bytes)))


def period(problem: Problem) -> int:
    """kT, steps from one checkpoint to the next."""
    return problem.interval * problem.steps


def capacity_bytes(problem: Problem) -> Integers:
    """⌊B·τ_t⌋ for t = 1..kT: shape (kT,), bytes. So many at most that their sum is an int64, too."""
    most = 2**62 // period(problem)
    one = [min(problem.bandwidth_bytes_per_s * time // TICKS_PER_BYTE, most) for time in problem.time_ns]
    return np.array(one * problem.interval, dtype=np.int64)


def resident_bytes(problem: Problem) -> Integers:
    """Bytes of training alone at t = 1..kT: shape (kT,)."""
    return np.array(problem.resident_bytes * problem.interval, dtype=np.int64)


def whole_chunks(problem: Problem, per_size_bytes: int) -> tuple[Chunk, ...]:
    """Every tensor cut into chunks of per_size_bytes and one remainder."""
    return tuple(
        Chunk(index, offset, min(per_size_bytes, tensor.size_bytes - offset))
        for index, tensor in enumerate(problem.state)
        for offset in range(0, tensor.size_bytes, per_size_bytes)
    )


def classes_of(problem: Problem, chunks: Iterable[Chunk], formulation: Formulation) -> tuple[ChunkClass, ...]:
    """Chunks by class, the earliest deadline first and then the largest."""
    found: dict[tuple[int, int, int], list[Chunk]] = {}
    for chunk in chunks:
        tensor = problem.state[chunk.state]
        last = tensor.last_write if formulation is Formulation.DIRECT else 0
        found.setdefault((tensor.first_write, -chunk.size_bytes, last), []).append(chunk)
    return tuple(ChunkClass(-size, first, last, tuple(found[first, size, last])) for first, size, last in sorted(found))


def allowed_steps(problem: Problem, kind: ChunkClass, formulation: Formulation) -> range:
    """The steps that may take a chunk of this class. docs/model.md, "compact" and "direct"."""
    if formulation is Formulation.DIRECT:
        release = kind.last_write - problem.steps
        return range(release + 1, release + period(problem) + 1)
    return range(2, period(problem) + 1) if kind.first_write > 1 else range(0)


def snapshot_of(kind: ChunkClass, step: int, formulation: Formulation) -> int | None:
    """The latest creation for an offload at this step, which dominates every earlier one; None is direct."""
    if formulation is Formulation.DIRECT:
        return None if step < kind.first_write else kind.first_write - 1
    return min(step, kind.first_write) - 1


def occupied_from(snapshot: int, formulation: Formulation) -> int:
    """First step that a snapshot occupies: a position's snapshot exists from the next step on."""
    return snapshot + 1 if formulation is Formulation.DIRECT else snapshot


def peak_bytes(problem: Problem, transfers: Iterable[Transfer], formulation: Formulation) -> int | None:
    """The exact peak of packed transfers; None where a step carries more than it can (Eq 9)."""
    length = period(problem)
    capacity = capacity_bytes(problem).tolist()
    change = [0] * (length + 1)
    always = 0
    for transfer in transfers:
        size = transfer.chunk.size_bytes
        capacity[(transfer.start - 1) % length] -= size
        if transfer.snapshot is None:
            continue
        rounds, steps = divmod(transfer.finish - occupied_from(transfer.snapshot, formulation) + 1, length)
        always += rounds * size
        first = (occupied_from(transfer.snapshot, formulation) - 1) % length
        change[first] += size
        if first + steps > length:  # around the period's end
            change[0] += size
            change[first + steps - length] -= size
        else:
            change[first + steps] -= size
    if min(capacity, default=0) < 0:
        return None
    held = accumulate(change[:length])
    resident = problem.resident_bytes * problem.interval
    return always + max((now + base for now, base in zip(held, resident, strict=True)), default=0)
