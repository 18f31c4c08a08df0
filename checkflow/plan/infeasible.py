"""Why no plan exists, as plan.Infeasible, with a bandwidth and an interval at which a plan was constructed.

Where arithmetic rules a figure out it is not tried; from the least that is left on, figures are tried until a plan
comes out, and the last gap is bisected. So a figure is no bound: with it, and nothing else changed, there is a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from checkflow.plan import TICKS_PER_BYTE, Infeasible, Plan, Problem, Reason, StateTensor
from checkflow.units import size_and_excess

MOST_BANDWIDTH = 1 << 60  # bytes per second; what needs more is called hopeless
MOST_INTERVAL = 1 << 12  # iterations: as far as any search for an interval goes
FARTHEST = 8  # times the least figure that arithmetic allows: as far as plans are tried

Needs = Callable[[Problem, Plan], int]  # bytes of memory that a plan needs where it is to run


def as_planned(_: Problem, plan: Plan) -> int:
    """A plan's own peak."""
    return plan.peak_bytes


def keeps_limit(problem: Problem, plan: Plan, needs: Needs) -> bool:
    """Whether a plan keeps to the problem's memory limit, as planned and where it is to run."""
    limit = problem.memory_limit_bytes
    return limit is None or max(plan.peak_bytes, needs(problem, plan)) <= limit


def too_large(problem: Problem, plan: Plan, needs: Needs) -> str:
    """Why a plan is over the memory limit, in one line."""
    limit = problem.memory_limit_bytes
    assert limit is not None, "a plan is over it"
    if plan.lower_bound_bytes > limit:
        return f"no plan needs less than {size_and_excess(plan.lower_bound_bytes, limit)}"
    if plan.peak_bytes > limit:
        return f"the plan needs {size_and_excess(plan.peak_bytes, limit)}"
    needed = size_and_excess(needs(problem, plan), limit)
    return f"moved to anchors, the plan needs {needed}"


@dataclass(frozen=True, slots=True)
class Construction:
    """How a formulation looks for a plan without a solver."""

    possible: Callable[[Problem], bool]  # False where arithmetic says that there is none
    construct: Callable[[Problem], Plan | None]  # a plan that keeps to the memory limit
    precision: int  # figures are found to one part in so many


def from_deadline(tensor: StateTensor) -> Infeasible:
    """The paper's model allows no snapshot before step 1, so no figure helps."""
    detail = f"{tensor.name} is overwritten at step 1, before the paper's model allows a snapshot"
    return Infeasible(Reason.DEADLINE, detail, None, None, None)


def infeasible(problem: Problem, reason: Reason, detail: str, search: Construction) -> Infeasible:
    """The answer, with the least bandwidth and interval for which the search finds a plan."""
    if not problem.iteration_time_ns:
        return Infeasible(reason, detail, None, None, None)
    bandwidth = _least(
        lambda value: replace(problem, bandwidth_bytes_per_s=value),
        problem.bandwidth_bytes_per_s,
        MOST_BANDWIDTH,
        search,
    )
    interval = _least(lambda value: replace(problem, interval=value), problem.interval, _longest(problem), search)
    return Infeasible(
        reason,
        detail,
        needed_bandwidth_bytes_per_s=bandwidth[0] if bandwidth else None,
        smallest_interval=interval[0] if interval else None,
        snapshot_bytes_at_that_interval=interval[1].snapshot_bytes if interval else None,
    )


def _longest(problem: Problem) -> int:
    """Past a few times the interval that the link needs nothing leaves any earlier."""
    work, carried = problem.state_bytes * TICKS_PER_BYTE, problem.clock(problem.steps)
    return min(MOST_INTERVAL, max(problem.interval, -(-work // carried)) * FARTHEST)


def _least(changed: Callable[[int], Problem], low: int, most: int, search: Construction) -> tuple[int, Plan] | None:
    """The least value above `low` for which a plan was constructed, up to the search's precision."""
    value = _possible(lambda value: search.possible(changed(value)), low, most)
    if value is None:
        return None
    failed, most, step = value - 1, min(most, value * FARTHEST), max(1, value // search.precision)
    while (plan := search.construct(changed(value))) is None:
        failed, value, step = value, value + step, step * 2
        if value > most:
            return None
    while value - failed > max(1, value // search.precision):
        middle = (failed + value) // 2
        found = search.construct(changed(middle))
        if found is None:
            failed = middle
        else:
            value, plan = middle, found
    return value, plan


def _possible(fits: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least value above `low` that fits, by doubling and bisection: exact where `fits` is monotone."""
    high = low + 1
    while not fits(high):
        low, high = high, high * 2
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
