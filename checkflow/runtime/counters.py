"""What the runtime counts while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """Why the training waited."""

    OPTIMIZER = "optimizer guard"
    FORWARD = "forward guard"
    LOAD = "load_state_dict guard"
    GRADIENT = "gradient that is written again"
    UNWATCHED = "state that no hook guards"
    RELEASE = "release of a snapshot"
    PAUSE = "pause of the policy"
    SLOT = "no free slot"
    LATE = "copies of the checkpoint before"
    PROOF = "proof that updates are made again to the bit"
    DRAIN = "drain"
    LOOK = "look for uncounted writes"


@dataclass(slots=True)
class Counters:
    """Shared by executor and device; only ever grows."""

    stall_ns: Counter[Cause] = field(default_factory=Counter)
    waits: Counter[Cause] = field(default_factory=Counter)
    offloaded_bytes: int = 0
    snapshot_bytes: int = 0
    link_busy_ns: int = 0
    issue_ns: int = 0  # host time spent in hooks and step, stalls included

    @property
    def waited_ns(self) -> int:
        """Training, for checkpoints: what save() waits for is the user's own, and looks are as many without them."""
        return self.stall_ns.total() - self.stall_ns[Cause.DRAIN] - self.stall_ns[Cause.LOOK]

    @contextmanager
    def stalling(self, cause: Cause) -> Iterator[None]:
        """What is done within is waited for."""
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            self.stalled(cause, time.perf_counter_ns() - started)

    def stalled(self, cause: Cause, time_ns: int) -> None:
        self.stall_ns[cause] += time_ns
        self.waits[cause] += 1
