"""A problem to a plan of least peak memory, or to why there is none: solve.py is the one way in.

Here are the words of both. No solver is imported with them.
"""

from checkflow.plan.answer import (
    Chunk,
    Formulation,
    Infeasible,
    Plan,
    ProvenBy,
    Reason,
    SolverRun,
    Transfer,
    Transfers,
)
from checkflow.plan.problem import PPM, TICKS_PER_BYTE, Problem, StateTensor, on_anchors, problem_of, unrolled

__all__ = [
    "PPM",
    "TICKS_PER_BYTE",
    "Chunk",
    "Formulation",
    "Infeasible",
    "Plan",
    "Problem",
    "ProvenBy",
    "Reason",
    "SolverRun",
    "StateTensor",
    "Transfer",
    "Transfers",
    "on_anchors",
    "problem_of",
    "unrolled",
]
