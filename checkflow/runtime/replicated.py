"""A checkpoint each iteration, of gradients and what none rebuilds: another process has the rest, by the same updates.

It is exact under the same conditions as parts are (parts.py). The first checkpoint is read as a whole, and so is the
one after any that was skipped. The state is told to the other process by a digest, which it has to come to: of the
first iteration after each such checkpoint until it has confirmed one, and now and then from then on, for no counter
tells of every write beside an update.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from checkflow.runtime.rolling import Rolling
from checkflow.state.host.updates import with_fields

TOLD_S = 60.0  # from one digest to the next


class OnHost(Protocol):
    """What is known of the updates that the host makes, too."""

    def lost(self) -> str:
        """Why it makes none any more; "" where it does."""

    def far(self) -> float:
        """How far the first one, when it was proven, was from the training's; 0: not at all."""

    def digest(self) -> str:
        """Of the state that updates make, as it is now."""

    def confirmed(self) -> bool:
        """Whether the other process has come to a digest."""


class Replicated(Rolling):
    """Of one executor whose schedule has a replica. Other arguments are those of Parts."""

    def __init__(self, *others: Any, on_host: OnHost) -> None:
        self._on_host = on_host
        self._far = 0.0
        self._next_s = 0.0  # time.monotonic, from which on the state is told again
        super().__init__(*others)

    def part_ended(self, completed: int) -> None:
        if not self.refused and (why := self._on_host.lost()):
            self.refuse(why)
        super().part_ended(completed)

    def prove(self) -> bool:
        proven, delta = self._proven_age, self._pipeline.newest
        if not super().prove():
            return False
        if delta is None or delta.updates is None or delta.record is None:
            return True
        fields = ""
        if self._proven_age > proven:
            self._far = self._on_host.far()
            fields = self._how_far(delta.iteration)
        if not self._far and self._is_told(delta.iteration):
            fields += f',"proof":"{self._on_host.digest()}"'
        if fields:
            record = delta.record
            delta.record = lambda: with_fields(record(), fields)
        return True

    def _is_due_again(self) -> bool:
        """What the other process comes to is told instead, and oftener."""
        return False

    def _is_told(self, iteration: int) -> bool:
        now = time.monotonic()
        if now < self._next_s if self._on_host.confirmed() else iteration != self._pipeline.base + 1:
            return False
        self._next_s = now + TOLD_S
        return True

    def _backs(self, iteration: int) -> list[int]:
        return [int(iteration != self._pipeline.base), 0]

    def _beside(self, iteration: int) -> str:
        return super()._beside(iteration) + self._how_far(iteration) if any(self._backs(iteration)) else ""

    def _how_far(self, iteration: int) -> str:
        updates = iteration - self._pipeline.base
        return f',"approximate":{{"updates":{updates},"each":{self._far!r}}}' if self._far else ""
