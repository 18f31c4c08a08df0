"""How often a disk takes a checkpoint, while nothing fails.

Taken for granted: of the writes of a disk that is never idle 64 stand for all. The mean age of what they take is off by
up to a tenth of a period, and not at all where a write takes a whole number of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p

from checkflow.simulation.costs import Costs

_SAMPLES = 64  # of a life's writes, by how probable it is that one is the last


@dataclass(frozen=True, slots=True)
class DiskPace:
    """Of a policy without deltas."""

    of: float  # it writes one of so many checkpoints
    every_ns: int  # from one write's begin to the next's
    ages: tuple[float, ...]  # periods since what a write takes was staged, when it begins; each as likely


def pace_of(costs: Costs, rate: float) -> DiskPace:
    """Of lives that end at this rate, per ns. A disk that is idle takes a checkpoint when that is staged."""
    if costs.write_ns <= max(costs.period_ns, costs.persist_gap_ns):
        of = max(1, -(-max(costs.persist_gap_ns, costs.write_ns) // costs.period_ns))
        return DiskPace(of, of * costs.period_ns, (0.0,))
    # Where a write takes a whole number of periods what is newest is just staged, otherwise any age below a period.
    numbers = (int(-log1p(-(each + 0.5) / _SAMPLES) / rate / costs.write_ns) for each in range(_SAMPLES))
    ages = tuple(number * costs.write_ns % costs.period_ns / costs.period_ns for number in numbers)
    return DiskPace(costs.write_ns / costs.period_ns, costs.write_ns, ages)
