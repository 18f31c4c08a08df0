"""checkflow itself: the plan of least peak, formulation direct with streaming transfers. It never pauses."""

from __future__ import annotations

from checkflow.plan import Formulation, Infeasible, Problem, Transfers
from checkflow.plan.solve import solve
from checkflow.policies.planned import Planned


def plan(problem: Problem) -> Planned | Infeasible:
    """The plan of least peak, or why there is none: the link is too slow, or the memory limit too low."""
    answer = solve(problem, Formulation.DIRECT, Transfers.STREAMING)
    if isinstance(answer, Infeasible):
        return answer
    return Planned(problem, answer, answer.peak_bytes, pause_ns=0)
