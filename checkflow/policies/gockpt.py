"""GoCkpt: several iterations for one checkpoint. A part of the state leaves in each of them, and is rebuilt.

A parameter and its entries leave in one of k iterations, as they are then; its gradients of the later ones go along,
and a restore makes the optimizer's updates of them again. So the link has k iterations for the state, and nothing has
to be held meanwhile but gradients on their way: no byte where they leave before training lets go of them.

The paper updates the parts on the host while training goes on, and says nothing of how exact that is. Here it is done
when a checkpoint is restored, on the training's device and with its optimizer, so that it is exact to the bit; what no
gradient rebuilds is saved as it is at the end. What is planned is the least peak for these parts, as for any other
state. What the paper calls GoCkpt-O, gradients held into the next forward pass so that no update waits for them, is
what a plan does wherever the link has not had the time.
"""

from __future__ import annotations

from dataclasses import replace

from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import Infeasible, Plan, Problem, on_anchors
from checkflow.plan.rebuilt import over_iterations
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.policies.rule import Asked, adds, constructed
from checkflow.schedule import Schedule

LONGEST = 1  # unless the link needs more: then checkflow's plan of the whole moves fewer bytes
_MOST_PARTS = 64  # a part that leaves first has as many gradients


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The plan of least peak for k parts, k the problem's interval; or why there is none, and for what k there is one.

    Where no gradient rebuilds any state (updates write them, say), all of it is of one part.
    """
    problem = on_anchors(problem, graph)
    if (found := _least(problem, graph, asked)) is not None:
        return _lowered(*found, graph, asked)
    answer = plan_streaming(problem)
    assert isinstance(answer, Infeasible)
    limit = problem.memory_limit_bytes
    hopeless = limit is not None and limit < problem.training_peak_bytes
    for count in range(problem.interval + 1, 1 if hopeless else _MOST_PARTS + 1):
        if (found := _least(replace(problem, interval=count), graph, asked)) is not None:
            held_bytes = _lowered(*found, graph, asked).certificate.snapshot_bytes
            return replace(answer, smallest_interval=count, snapshot_bytes_at_that_interval=held_bytes)
    return answer  # as a whole it may be, at some longer interval


def _least(problem: Problem, graph: Graph, asked: Asked) -> tuple[Plan, Problem] | None:
    """In parts, or as a whole where that needs less: gradients may be as much as the state that they rebuild.

    Where both add to the peak, in parts with factors if that adds less.
    """
    found = [*constructed(over_iterations(problem, graph, problem.interval)), *constructed(problem)]
    if asked.factors and problem.interval > 1 and adds(found, problem):
        found += constructed(over_iterations(problem, graph, problem.interval, factors=True))
    return min(found, key=lambda one: one[0].peak_bytes) if found else None


def _lowered(plan: Plan, planned: Problem, graph: Graph, asked: Asked) -> Schedule:
    return lower(
        plan,
        planned,
        graph,
        bandwidth_bytes_per_s=asked.bandwidth_bytes_per_s,
        slack_ppm=asked.slack_ppm,
        policy="gockpt",
    )
