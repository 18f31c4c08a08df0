"""What a learner asks of the runtime."""

from __future__ import annotations

from typing import Protocol

from checkflow.learning.link import Copied


class Running(Protocol):
    """What the runtime knows of the iterations so far. Few of them need to know it."""

    @property
    def copied(self) -> Copied: ...

    @property
    def waited_ns(self) -> int:
        """Training, for copies, so far."""

    @property
    def state_bytes(self) -> int:
        """Of a checkpoint."""

    @property
    def opaque(self) -> bool:
        """Whether code runs that no operator of can be seen: compiled, or captured as a CUDA graph."""

    @property
    def silent(self) -> bool:
        """Whether anchors of the schedule did not fire."""
