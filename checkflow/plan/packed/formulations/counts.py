"""The counts model: how many chunks of a class leave at each step. `compact` and `direct` are two uses of it.

Columns: n[class, step] for each step that may take a chunk of the class, then the snapshot bytes held at each step
that can matter, then the peak's excess over training. The rows keep the numbers of the paper's equations.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np
import scipy.sparse as sp

from checkflow.plan import Chunk, Formulation, Problem, Transfer
from checkflow.plan.packed.program import Floats, Integers, Program
from checkflow.plan.packed.steps import (
    ChunkClass,
    Model,
    allowed_steps,
    capacity_bytes,
    classes_of,
    period,
    resident_bytes,
    snapshot_of,
)


def counts_model(problem: Problem, chunks: tuple[Chunk, ...], formulation: Formulation) -> Model:
    """The counts model of `compact` or `direct` with packed transfers, over the given chunks."""
    kinds = classes_of(problem, chunks, formulation)
    unit = math.gcd(*(kind.size_bytes for kind in kinds)) or 1
    length, capacity, resident = period(problem), capacity_bytes(problem) // unit, resident_bytes(problem)
    kind_of, step_of = _options(problem, kinds, formulation, capacity * unit)
    folded = (step_of - 1) % length
    size = np.array([kind.size_bytes // unit for kind in kinds], dtype=np.int64)[kind_of]
    count = np.array([len(kind.chunks) for kind in kinds], dtype=np.int64)
    base = problem.training_peak_bytes
    tight = np.flatnonzero(base - resident < sum(chunk.size_bytes for chunk in chunks))  # others never bind
    n, held = len(step_of), len(tight)
    columns = n + held + 1
    every = np.arange(n)

    create = sp.csr_array((np.ones(n), (kind_of, every)), shape=(len(kinds), columns))
    carry = sp.csr_array((size.astype(np.float64), (folded, every)), shape=(length, columns))
    busy = np.flatnonzero(np.bincount(folded, minlength=length))
    balance = _balance(kinds, kind_of, step_of, size, formulation, length, tight, columns)
    at = np.arange(held)
    peak = sp.csr_array(
        (np.repeat([1.0, -1.0], held), (np.tile(at, 2), np.concatenate((n + at, np.full(held, columns - 1))))),
        shape=(held, columns),
    )
    upper = np.concatenate(
        (np.minimum(count[kind_of], capacity[folded] // np.maximum(size, 1)), np.full(held + 1, np.inf))
    )
    zeros, free = np.zeros(held), np.full(held, -np.inf)
    program = Program(
        objective=np.concatenate((np.zeros(columns - 1), [1.0])),
        lower=np.zeros(columns),
        upper=upper,
        integral=np.arange(columns) < n,
        matrix=sp.csr_array(sp.vstack((create, carry[busy], balance, peak), format="csr")),
        row_lower=np.concatenate((count, np.full(len(busy), -np.inf), zeros, free)),
        row_upper=np.concatenate((count, capacity[busy], zeros, (base - resident[tight]) / unit)),
        families=_families(eq4=len(kinds), eq9=len(busy), eq11=held, eq10=held),
    )

    def decode(x: Floats) -> tuple[Transfer, ...]:
        return _transfers(kinds, kind_of, step_of, np.rint(x[:n]).astype(np.int64), formulation)

    def encode(transfers: tuple[Transfer, ...]) -> Floats:
        place = {(int(k), int(s)): i for i, (k, s) in enumerate(zip(kind_of, step_of, strict=True))}
        class_of = {chunk: index for index, kind in enumerate(kinds) for chunk in kind.chunks}
        x = np.zeros(columns)
        for transfer in transfers:
            x[place[class_of[transfer.chunk], transfer.start]] += 1.0
        x[n : n + held] = np.cumsum(-(balance[:, :n] @ x[:n]))
        x[-1] = max(0.0, float(np.max(x[n : n + held] - (base - resident[tight]) / unit, initial=0.0)))
        return x

    return Model(program, base, unit, decode, encode)


def _options(
    problem: Problem, kinds: tuple[ChunkClass, ...], formulation: Formulation, capacity: Integers
) -> tuple[Integers, Integers]:
    """(class, step) of each pair in which the step alone can carry a chunk of the class."""
    steps = [np.array(allowed_steps(problem, kind, formulation), dtype=np.int64) for kind in kinds]
    steps = [at[capacity[(at - 1) % len(capacity)] >= kind.size_bytes] for at, kind in zip(steps, kinds, strict=True)]
    which = [np.full(len(at), index, dtype=np.int64) for index, at in enumerate(steps)]
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate((none, *which)), np.concatenate((none, *steps))


def _balance(
    kinds: tuple[ChunkClass, ...],
    kind_of: Integers,
    step_of: Integers,
    size: Integers,
    formulation: Formulation,
    length: int,
    tight: Integers,
    columns: int,
) -> sp.csr_array:
    """held[i] - held[i - 1] = what the i-th tight step occupies and the one before does not, less the reverse.

    Written so, each count stands in a handful of rows; one row of all counts for each step would be quadratic.
    """
    n, rows = len(step_of), len(tight)
    deadline = np.array([kind.first_write for kind in kinds], dtype=np.int64)[kind_of]
    if formulation is Formulation.DIRECT:
        first = np.where(step_of < deadline, step_of + 1, deadline)  # empty for a direct transfer
    else:
        first = np.minimum(step_of, deadline) - 1
    begin = (first - 1) % length
    end = begin + (step_of - first) + 1  # exclusive
    parts: list[tuple[Integers, Integers, Integers]] = []
    for low, high in ((begin, np.minimum(end, length)), (np.zeros_like(begin), np.maximum(end - length, 0))):
        enter, leave = np.searchsorted(tight, low), np.searchsorted(tight, high)
        for row, sign in ((enter, -1), (leave, 1)):
            use = np.flatnonzero((enter < leave) & (row < rows))
            parts.append((row[use], use, sign * size[use]))
    at = np.arange(rows)
    parts += [
        (at, n + at, np.ones(rows, dtype=np.int64)),
        (at[1:], n + at[:-1], -np.ones(max(rows - 1, 0), dtype=np.int64)),
    ]
    row, column, value = (np.concatenate(part) for part in zip(*parts, strict=True))
    return sp.csr_array((value.astype(np.float64), (row, column)), shape=(rows, columns))


def _transfers(
    kinds: tuple[ChunkClass, ...], kind_of: Integers, step_of: Integers, taken: Integers, formulation: Formulation
) -> tuple[Transfer, ...]:
    """Chunks of each class in order, the earliest step first; then all in link order."""
    queues = [iter(kind.chunks) for kind in kinds]
    found = [
        Transfer(next(queues[kind]), snapshot_of(kinds[kind], step, formulation), step, step)
        for kind, step, number in zip(kind_of.tolist(), step_of.tolist(), taken.tolist(), strict=True)
        for _ in range(number)
    ]
    return tuple(sorted(found, key=lambda transfer: transfer.start))


def _families(**rows: int) -> MappingProxyType[str, slice]:
    """Consecutive runs of rows, by name."""
    found, start = {}, 0
    for name, number in rows.items():
        found[name] = slice(start, start + number)
        start += number
    return MappingProxyType(found)
