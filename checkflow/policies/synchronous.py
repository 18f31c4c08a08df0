"""Training stands still at the iteration's end until the whole state is on the host.

Figure 4b of CheckFreq (FAST '21, section 4.3.1): the snapshot in host memory is taken while training waits, and written
to disk behind its back. In its favour, the copy has the link's full bandwidth, the disk is never waited for, and state
that the iteration never writes is not in a Problem, and so not copied again with each checkpoint.
"""

from __future__ import annotations

from checkflow.graph import Graph
from checkflow.plan import Infeasible, Problem, on_anchors
from checkflow.plan.timeline.grid import TimeGrid
from checkflow.policies.rule import Asked, Ruled, scheduled, until_arrived, whole_state, within_limit
from checkflow.schedule import Schedule


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The rule on the graph's anchors."""
    problem = on_anchors(problem, graph)
    return scheduled("synchronous", rule(problem), problem, graph, asked)


def rule(problem: Problem) -> Ruled | Infeasible:
    """A pause of S/B at the end of each k-th iteration, and no byte of memory.

    Infeasible where the memory limit is below what training alone needs.
    """
    pause = until_arrived(TimeGrid.of(problem), 0) if problem.state else None
    return within_limit(Ruled(whole_state(problem), pause, problem.training_peak_bytes), problem, None)
