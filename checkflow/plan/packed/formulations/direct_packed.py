"""Direct offload with packed transfers: counts over the cyclic window (release, release + kT], all steps folded.

A step at or before the deadline reads the live tensor and costs nothing; a later one needs a snapshot, which at the
latest position, the deadline, occupies a subset of the steps of any earlier one.
"""

from __future__ import annotations

from checkflow.plan import Chunk, Formulation, Problem
from checkflow.plan.packed.formulations.counts import counts_model
from checkflow.plan.packed.steps import Model


def build(problem: Problem, chunks: tuple[Chunk, ...]) -> Model:
    """The plans of `direct` whose transfers each stay within one step."""
    return counts_model(problem, chunks, Formulation.DIRECT)
