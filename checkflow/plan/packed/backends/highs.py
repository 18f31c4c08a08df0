"""HiGHS, through arrays. Free, always there: the default where Gurobi's licence does not cover the model.

HiGHS looks at its time limit, and at requests to stop, only now and then: a model of 120,000 columns was seen to run
for minutes past both. So small models are solved on a thread, and large ones in a process that can be killed.
"""

from __future__ import annotations

from checkflow.plan.packed.backends._highs_here import solve_here
from checkflow.plan.packed.backends._highs_process import solve_in_process
from checkflow.plan.packed.program import Floats, Log, Program, Solution

SMALL_NONZEROS = 20_000


class Highs:
    """Integer programs by branch and cut."""

    def refuses(self, program: Program) -> str | None:  # noqa: ARG002 (it takes every program)
        return None

    def solve(
        self, program: Program, *, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
    ) -> Solution:
        if program.matrix.nnz > SMALL_NONZEROS:
            return solve_in_process(program, time_limit_s, warm_start, log)
        return solve_here(program, time_limit_s, warm_start, log)


BACKEND = Highs()
