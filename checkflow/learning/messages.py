"""What the trainer asks the planner's process, and what that answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkflow.graph import Graph
from checkflow.schedule import Schedule

DEFAULT_POLICY = "checkflow"
REPLICATED = "lowdiff_plus"  # the one of which the host makes the updates, too
IN_LANES = ("lowdiff", REPLICATED, "rolling")  # those that may have several kinds of slots
IN_PARTS = ("gockpt", *IN_LANES)  # and those whose parts are rebuilt by gradients
COPIES = "checkfreq"  # the one whose copies are made in the device's memory
POLICIES = (DEFAULT_POLICY, COPIES, "checkfreq_cpu", *IN_PARTS, "synchronous")
"""By which a schedule can be learned. Names alone: whoever trains does not import what plans."""


@dataclass(frozen=True)
class Request:
    """Plan this."""

    graph: Graph  # with times
    bandwidth_bytes_per_s: int  # of the link
    policy: str
    interval: int | None  # iterations from one checkpoint to the next; None: the fewest that the link allows
    factors: bool  # gradients may leave as their factors
    keep_as: Path | None  # where the next start finds graph and schedule, less the endings of their names


@dataclass(frozen=True)
class Planned:
    """A schedule that was verified."""

    schedule: Schedule
    plan_s: float


@dataclass(frozen=True)
class Unplanned:
    """Why there is none, in a line."""

    why: str


Answer = Planned | Unplanned
