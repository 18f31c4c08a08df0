"""Windows without their part before the iteration's end: what a plan could do that reads nothing early."""

from __future__ import annotations

from dataclasses import replace

from checkflow.plan import Problem


def read_after_iteration(problem: Problem) -> Problem:
    """The same problem where nothing is read before the iteration's end: every window opens there, if not later."""
    return replace(problem, state=tuple(replace(tensor, last_write=problem.steps) for tensor in problem.state))
