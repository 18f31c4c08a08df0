"""LowDiff+ (Yao et al.): each iteration its gradients leave, and the host makes the same updates on a replica.

The replica is in host memory, and a process beside the training brings it an iteration on as soon as that one's
gradients are there. It is what is written to disk, and what a killed trainer comes back to: a whole state, of which a
restore makes no update again. The link carries a third of the state of AdamW, and what no gradient rebuilds.

The paper has each gradient copied as soon as the backward pass has made it. Here it leaves where the plan of least peak
has it, which is after clipping and unscaling: as its optimizer consumes it. And where gradients add to the peak, those
of linear layers may leave as their factors.
"""

from __future__ import annotations

from dataclasses import replace

from checkflow.graph import Graph
from checkflow.plan import Infeasible, Problem, on_anchors
from checkflow.plan.rebuilt import for_replica
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.policies.rolling import lowered
from checkflow.policies.rule import Asked, adds, constructed
from checkflow.schedule import Schedule

LONGEST = 1  # at any other interval it is checkflow's plan
OF_ONE_PROCESS = True  # whose state the host keeps and updates


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The plan of least peak for gradients, each iteration; of the whole where no gradient rebuilds any."""
    problem = on_anchors(problem, graph)
    sent = for_replica(problem, graph) if problem.interval == 1 else None
    if sent is None:
        return lowered(constructed(problem), problem, graph, asked, "lowdiff_plus")
    found = constructed(sent)
    if asked.factors and adds(found, problem) and (factored := for_replica(problem, graph, factors=True)) is not None:
        sent = factored
        found += constructed(factored)
    if not found:
        refused = plan_streaming(sent)
        assert isinstance(refused, Infeasible)
        return replace(refused, smallest_interval=None, snapshot_bytes_at_that_interval=None)  # it has no other
    return lowered(found, problem, graph, asked, "lowdiff_plus")
