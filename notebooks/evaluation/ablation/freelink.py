"""The slowest link over which a checkpoint at every iteration costs no memory, and by which part of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from checkflow.graph import Graph
from checkflow.lower import anchor_grid
from checkflow.plan import TICKS_PER_BYTE, Formulation, Problem, problem_of
from checkflow.plan.packed.bounds import least_peak_bytes, link_fits
from checkflow.plan.timeline.fluid import earliest_deadline_first, lower_bound_bytes
from evaluation.ablation.windows import read_after_iteration


@dataclass(frozen=True, slots=True)
class FreeLink:
    """The slowest link over which a checkpoint at every iteration adds no byte to the training peak, in B/s.

    By the lower bounds, which plans meet up to the granule; to 1%. None where no link helps.
    """

    cell: str
    any_bytes_per_s: int  # over which there is a plan at all: S / T
    paper_bytes_per_s: int | None
    not_cyclic_bytes_per_s: int | None
    planned_bytes_per_s: int | None
    executed_bytes_per_s: int | None


def free_link(graph: Graph, cell: str = "") -> FreeLink:
    """See FreeLink."""
    problem = problem_of(graph, bandwidth_bytes_per_s=1)
    least = -(-problem.state_bytes * TICKS_PER_BYTE // problem.iteration_time_ns)
    closed = read_after_iteration(problem)
    paper = not any(tensor.first_write == 1 for tensor in problem.state)

    def by_bound(asked: Problem, formulation: Formulation) -> bool:
        return link_fits(asked, formulation) and least_peak_bytes(asked, formulation) == asked.training_peak_bytes

    def on_anchors(asked: Problem) -> bool:
        grid = anchor_grid(asked, graph)
        return lower_bound_bytes(grid, earliest_deadline_first(grid)) <= asked.training_peak_bytes

    direct = partial(by_bound, formulation=Formulation.DIRECT)
    return FreeLink(
        cell=cell,
        any_bytes_per_s=least,
        paper_bytes_per_s=_least(problem, least, partial(by_bound, formulation=Formulation.COMPACT)) if paper else None,
        not_cyclic_bytes_per_s=_least(closed, least, direct),
        planned_bytes_per_s=_least(problem, least, direct),
        executed_bytes_per_s=_least(problem, least, on_anchors),
    )


def _least(problem: Problem, low: int, free: Callable[[Problem], bool]) -> int | None:
    """The least bandwidth from `low` on that is free, to 1%, by doubling and bisection."""

    def at(bandwidth: int) -> bool:
        return free(replace(problem, bandwidth_bytes_per_s=bandwidth))

    if at(low):
        return low
    high = 2 * low
    while not at(high):
        low, high = high, 2 * high
        if high > 10**15:
            return None
    while high > 1.01 * low:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) else (middle, high)
    return high
