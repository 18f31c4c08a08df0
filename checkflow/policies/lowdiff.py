"""LowDiff (Yao et al.) without compression: the whole state each few iterations, and the gradients of each one between.

A checkpoint is the newest base and the gradients since, of which a restore makes the optimizer's updates again, one
after the other. (The paper's recovery adds gradients up first, in log n steps. No optimizer that keeps a state is
linear, so that is another state than the training's.)

The paper's base is a stall or a copy; here it leaves as any other state, planned for the least peak over all of its
iterations. How many these are is the least that the link carries: the base is a burst that gradients have to make up
for, or what `--lanes` says. The paper's Eq 10 weighs how long bases hold training up against how many updates a restore
makes again. Here a base holds nothing up, so that only the second counts, and fewer iterations between bases make it
less; a learned schedule follows the link. How many gradients go to a write is for `persist_every`.

Nothing is left out of gradients. Of the largest alone (top-k) an error feedback would keep the rest as state, which
nothing that was sent rebuilds: to restore it to the bit it would have to leave whole, in each iteration, and be as many
bytes as the gradients that it saves.
"""

from __future__ import annotations

from checkflow.graph import Graph
from checkflow.plan import Infeasible, Problem, on_anchors
from checkflow.policies.rolling import MOST_LANES as MOST_LANES
from checkflow.policies.rolling import in_so_many, least_lanes, lowered
from checkflow.policies.rule import Asked, constructed
from checkflow.schedule import Schedule

LONGEST = 1  # at any other interval it is checkflow's plan


def schedule(problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
    """The plan of least peak for a base and gradients, each iteration; of the whole where no gradient rebuilds any."""
    problem = on_anchors(problem, graph)
    if asked.lanes is not None:
        return in_so_many(asked.lanes, problem, graph, asked, "lowdiff", base=True)
    found = least_lanes(problem, graph, asked, base=True) if problem.interval == 1 else []
    return lowered(found or constructed(problem), problem, graph, asked, "lowdiff")
