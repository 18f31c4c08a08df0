"""The paper's optimum from counts: n[class, s] chunks of equal deadline and size leave at step s.

*Dominance*: given s, the creation min(s, u) - 1 occupies a subset of the steps of any earlier one, so C, P and alpha
follow from S. *Symmetry*: chunks of one class can be exchanged, so their number at each step says all.
"""

from __future__ import annotations

from checkflow.plan import Chunk, Formulation, Problem
from checkflow.plan.packed.formulations.counts import counts_model
from checkflow.plan.packed.steps import Model


def build(problem: Problem, chunks: tuple[Chunk, ...]) -> Model:
    """The same set of plans as `paper`, and the same optimum."""
    return counts_model(problem, chunks, Formulation.COMPACT)
