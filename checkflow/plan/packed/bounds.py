"""What arithmetic says before any search: can the link carry the bytes, and which peak can no packed plan beat?

Both hold for every chunking: they let a chunk be split at any byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from checkflow.plan import Chunk, Formulation, Problem
from checkflow.plan.packed.program import Integers
from checkflow.plan.packed.steps import capacity_bytes, resident_bytes
from checkflow.plan.timeline.fluid import earliest_deadline_first, lower_bound_bytes
from checkflow.plan.timeline.grid import TimeGrid


def link_fits(problem: Problem, formulation: Formulation) -> bool:
    """Whether the state fits the steps that may carry it: all of them, or in the paper's model all but the first."""
    capacity = capacity_bytes(problem)
    first = 0 if formulation is Formulation.DIRECT else 1
    return problem.state_bytes <= int(capacity[first:].sum())


def chunks_can_fit(problem: Problem, chunks: tuple[Chunk, ...], formulation: Formulation) -> bool:
    """False where counting proves that the chunks cannot be packed: n of size z or more need n places of size z."""
    return sizes_can_fit(problem, Counter(chunk.size_bytes for chunk in chunks), formulation)


def sizes_can_fit(problem: Problem, number_of: Mapping[int, int], formulation: Formulation) -> bool:
    """The same from the number of chunks of each size."""
    capacity = capacity_bytes(problem)[0 if formulation is Formulation.DIRECT else 1 :]
    sizes = sorted(number_of, reverse=True)
    numbers = accumulate(number_of[size] for size in sizes)
    return all(number <= int((capacity // size).sum()) for size, number in zip(sizes, numbers, strict=True))


def least_peak_bytes(problem: Problem, formulation: Formulation) -> int:
    """A peak that no plan can beat. The link has to fit (link_fits), and in the paper's model no tensor is due at 1."""
    if formulation is Formulation.DIRECT:
        grid = TimeGrid.everywhere(problem)
        return max(problem.training_peak_bytes, lower_bound_bytes(grid, earliest_deadline_first(grid)))
    capacity, resident = capacity_bytes(problem), resident_bytes(problem)
    due = np.zeros(len(resident), dtype=np.int64)  # at step t: bytes that are snapshot by then, or have left
    for tensor in problem.state:
        due[tensor.first_write - 2 :] += tensor.size_bytes
    low, high = problem.training_peak_bytes, problem.training_peak_bytes + problem.state_bytes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fluid_fits(capacity, middle - resident, due) else (middle + 1, high)
    return low


def _fluid_fits(capacity: Integers, headroom: Integers, due: Integers) -> bool:
    """Whether the paper's rules, with chunks split at any byte, let a peak with this headroom pass.

    What leaves at step s occupies s - 1 and s, so no more can than either has room for; what is due by step t and did
    not leave before it occupies t.
    """
    leaves = np.minimum(capacity[1:], np.minimum(headroom[1:], headroom[:-1]))  # at steps 2..kT
    left_before = np.concatenate((np.zeros(2, dtype=np.int64), np.cumsum(leaves)))  # before steps 1, 2, 3, ..., kT + 1
    return bool(np.all(due - left_before[:-1] <= headroom) and due[-1] <= left_before[-1])
