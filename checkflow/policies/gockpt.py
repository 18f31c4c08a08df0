"""GoCkpt: several iterations for one checkpoint. A part of the state leaves in each of them, and is rebuilt.

A parameter and its entries leave in one of k iterations, as they are then; its gradients of the later ones go along, and
a restore makes the optimizer's updates of them again. So the link has k iterations for the state, and nothing has to be
held meanwhile but gradients on their way: no byte where they leave before training lets go of them.

The paper updates the parts on the host while training goes on, and says nothing of how exact that is. Here it is done
when a checkpoint is restored, on the training's device and with its optimizer, so that it is exact to the bit; what a
gradient does not rebuild is saved as it is at the end. What is planned is the least peak for these parts, as for any
other state.
"""

from __future__ import annotations

from dataclasses import replace

from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import Infeasible, Problem, Reason, on_anchors
from checkflow.plan.rebuilt import over_iterations, rebuilt_in
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.policies.rule import Link
from checkflow.schedule import Schedule

LONGEST = 64  # iterations for one checkpoint: a part that leaves first has as many gradients


def schedule(problem: Problem, graph: Graph, link: Link) -> Schedule | Infeasible:
    """The plan of least peak for k parts, k the problem's interval; or why there is none, and what k there is one for.

    Infeasible, whatever k, where no gradient rebuilds any state: it is zeroed in place, or written by several updates.
    """
    problem = on_anchors(problem, graph)
    if problem.interval > 1 and not rebuilt_in(graph):
        return Infeasible(Reason.DEADLINE, _NOTHING, None, None, None)
    answer = _scheduled(problem, graph, link)
    if not isinstance(answer, Infeasible):
        return answer
    longer = (replace(problem, interval=count) for count in range(problem.interval + 1, LONGEST + 1))
    for each in longer if rebuilt_in(graph) else ():
        found = _scheduled(each, graph, link)
        if not isinstance(found, Infeasible):
            return replace(
                answer, smallest_interval=each.interval, snapshot_bytes_at_that_interval=found.certificate.snapshot_bytes
            )
    return replace(answer, smallest_interval=None, snapshot_bytes_at_that_interval=None)


def _scheduled(problem: Problem, graph: Graph, link: Link) -> Schedule | Infeasible:
    parts = over_iterations(problem, graph, problem.interval)
    plan = plan_streaming(parts)
    if isinstance(plan, Infeasible):
        return plan
    return lower(
        plan,
        parts,
        graph,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        slack_ppm=link.slack_ppm,
        policy="gockpt",
    )


_NOTHING = (
    "no gradient rebuilds any of the state: each would have to be a tensor of its own, made anew in each iteration "
    "(zero_grad() with set_to_none) and consumed by one update"
)
