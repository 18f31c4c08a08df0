"""Rolling: a checkpoint each iteration, of which each iteration carries a part, where the link cannot carry it whole.

The state is in K parts. Each iteration sends one of them in turn, the gradients of the others, and all that no
gradient rebuilds. So whatever iteration is the last one, its parts of up to K - 1 iterations before are there, with the
gradients that bring them to it: a restore makes the optimizer's updates of them again, as for GoCkpt. No burst, no
longer interval; each iteration carries 1/K of the state and the gradients of the rest.

K is the least for which there is a plan, so that a restore makes the fewest updates again, unless one or two more need
fewer bytes. Where there is none because gradients are no less than the state (plain SGD), or where it adds to the peak,
those of linear layers may leave as their factors: fewer bytes, and so fewer parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import Infeasible, Plan, Problem, on_anchors
from checkflow.plan.rebuilt import in_lanes
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.policies.rule import Asked, adds, constructed
from checkflow.schedule import Schedule
from checkflow.spelling import option

LONGEST = 1  # at any other interval it is checkflow's plan
MOST_LANES = 16  # of which host memory holds three checkpoints at once
_LONGER = 2  # lanes more that are looked at for fewer bytes


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The plan of least peak for the whole state where the link carries it, else in lanes; or why there is none."""
    problem = on_anchors(problem, graph)
    if asked.lanes is not None:
        return in_so_many(asked.lanes, problem, graph, asked, "rolling")
    found = constructed(problem)  # as a whole
    if not found and problem.interval == 1:
        found = least_lanes(problem, graph, asked)
    return lowered(found, problem, graph, asked, "rolling")


def in_so_many(
    lanes: int, problem: Problem, graph: Graph, asked: Asked, policy: str, *, base: bool = False
) -> Schedule | Infeasible:
    """In as many lanes as were asked for, with factors where that takes less memory, or why there is none.

    Raises InputError where no gradient rebuilds any of the state.
    """
    with_gradients, with_factors = (
        in_lanes(problem, graph, lanes, base=base, factors=factors) for factors in (False, True)
    )
    if with_gradients is None or with_factors is None:
        raise InputError(f"{option('lanes', lanes)}: no gradient rebuilds any of this state; leave it out")
    found = constructed(with_gradients)
    if asked.factors and adds(found, problem):
        found += constructed(with_factors)
    if not found:
        refused = plan_streaming(with_factors if asked.factors else with_gradients)
        assert isinstance(refused, Infeasible)
        return replace(refused, smallest_interval=None, snapshot_bytes_at_that_interval=None)  # that of all lanes
    return lowered(found, problem, graph, asked, policy)


def lowered(
    found: Sequence[tuple[Plan, Problem]], problem: Problem, graph: Graph, asked: Asked, policy: str
) -> Schedule | Infeasible:
    """The schedule of the plan of least peak that was found; where none was, why there is none of the whole."""
    if not found:
        answer = plan_streaming(problem)
        assert isinstance(answer, Infeasible)
        return answer
    least, planned = min(found, key=lambda one: (one[0].peak_bytes, one[1].lanes))
    return lower(
        least,
        planned,
        graph,
        bandwidth_bytes_per_s=asked.bandwidth_bytes_per_s,
        slack_ppm=asked.slack_ppm,
        policy=policy,
    )


def least_lanes(problem: Problem, graph: Graph, asked: Asked, *, base: bool = False) -> list[tuple[Plan, Problem]]:
    """Of the least number of lanes for which there is a plan, and of a few more where that needs memory.

    Where that needs memory still, or there is none, with factors, too.
    """
    found = _least_lanes(problem, graph, base, factors=False)
    if asked.factors and adds(found, problem):
        found += _least_lanes(problem, graph, base, factors=True)
    return found


def _least_lanes(problem: Problem, graph: Graph, base: bool, factors: bool) -> list[tuple[Plan, Problem]]:
    found: list[tuple[Plan, Problem]] = []
    for count in range(2, MOST_LANES + 1):
        laned = in_lanes(problem, graph, count, base=base, factors=factors)
        plans = [] if laned is None else constructed(laned)
        found += plans
        if not adds(plans, problem):
            break
        if found and count >= found[0][1].lanes + _LONGER:
            break
    return found
