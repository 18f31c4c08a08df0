"""checkflow itself: the plan of least peak, formulation direct with streaming transfers. It never pauses."""

from __future__ import annotations

from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import Infeasible, Problem, on_anchors
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.policies.rule import Asked
from checkflow.schedule import Schedule


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The plan of least peak, or why there is none: the link is too slow, or the memory limit too low."""
    problem = on_anchors(problem, graph)
    plan = plan_streaming(problem)
    if isinstance(plan, Infeasible):
        return plan
    return lower(plan, problem, graph, bandwidth_bytes_per_s=asked.bandwidth_bytes_per_s, slack_ppm=asked.slack_ppm)
