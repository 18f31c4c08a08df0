"""A checkpoint each iteration, of which each iteration fills a part: slots of K lanes in turn, or what a replica needs.

A part is exact under the same conditions as one of several iterations (parts.py). In each iteration the slot of its
lane takes the parameters of that lane as they are at its end, and the gradients of all others. So with the K - 1
slots before it, it completes a checkpoint. The first one is read at once, and so is the one after any that was skipped:
it fills a slot of each lane. Those that follow it are proven until parts of every age were.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.parts import Parts
from checkflow.schedule import Schedule
from checkflow.state.host.updates import Updates, with_fields

TOLD_S = 60.0  # from one digest of the state for a replica to the next


class Rolling(Parts):
    """Of one executor whose schedule has lanes. Arguments are those of Parts."""

    def _prepare(self, schedule: Schedule) -> None:
        rebuilt = schedule.rebuilt()
        self._earlier = dict.fromkeys(rebuilt, 1)
        lanes = {view.name: rebuilt[row.id] for row in schedule.state if row.id in rebuilt for view in row.views}
        self._lane_of = {name: lanes[name] for name in self._rows}
        self._others = [
            frozenset(name for name, its in self._lane_of.items() if its != lane)
            for lane in range(self._pipeline.lanes)
        ]
        self._history = Updates()
        self._proven_age = 0  # iterations that a part may be older than its checkpoint
        self._pipeline.beside = self._beside

    def consumes(self, running: int, number: int, arguments: tuple[object, ...]) -> None:
        if self._pipeline.goes_on(running):
            self._pipeline.open(running)
        super().consumes(running, number, arguments)

    def factored(self, running: int, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        if self._pipeline.goes_on(running):
            self._pipeline.open(running)
        super().factored(running, name, left, right)

    def part_ended(self, completed: int) -> None:
        self.factors.forget()
        for number in tuple(self._after):
            self._compare(number)
        if not self.refused and (text := self._part_text()) is not None:
            self._history.forget_before(completed - self._pipeline.lanes)
            self._history.add_part(completed, (), text)

    def prove(self) -> bool:
        checkpoint = self._pipeline.newest
        if checkpoint is None or self._proven_age == self._pipeline.lanes - 1:
            return True
        iteration = checkpoint.iteration
        backs = self._backs(iteration)
        if max(backs) <= self._proven_age:
            return True
        self._proven_age = max(backs)
        return self._holds(self._history.text(iteration, self._saved(backs, iteration)), self._pipeline.chain, backs)

    def _wanted(self, running: int, _back: int) -> frozenset[str]:
        return self._others[self._pipeline.lane(running)]

    def _texts(self, _checkpoint: InFlight) -> Updates:
        return self._history

    def _backs(self, iteration: int) -> list[int]:
        """Of each lane, how many iterations before this checkpoint's it was saved."""
        lanes = self._pipeline.lanes
        oldest = iteration - self._pipeline.base
        return [min((iteration - lane) % lanes, oldest) for lane in range(lanes)]

    def _saved(self, backs: list[int], iteration: int) -> Mapping[int, tuple[str, ...]]:
        """The parameters that it has of each earlier iteration."""
        found: dict[int, list[str]] = {}
        for name, lane in self._lane_of.items():
            if backs[lane]:
                found.setdefault(iteration - backs[lane], []).append(name)
        return {of: tuple(names) for of, names in found.items()}

    def _beside(self, iteration: int) -> str:
        backs = self._backs(iteration)
        lanes = f',"lanes":{json.dumps(backs)}'
        return lanes + (self._history.field(iteration, self._saved(backs, iteration)) if any(backs) else "")


class Replicated(Rolling):
    """Of one executor whose schedule has a replica: each iteration's slot has gradients, and what none rebuilds.

    The first checkpoint is read as a whole, and so is the one after any that was skipped. The state is told to the
    other process by a digest, which it has to come to: of the first iteration after each such checkpoint until it has
    confirmed one, and now and then from then on, for no counter tells of every write beside an update.

    Args:
        lost: why the host makes no updates any more; "" where it does.
        far: how far the host's first update, when it was proven, was from the training's; 0: not at all.
        digest: of the state that updates make, as it is now.
        confirmed: whether the other process has come to one.
        others: those of Rolling.
    """

    def __init__(
        self,
        *others: Any,
        lost: Callable[[], str],
        far: Callable[[], float],
        digest: Callable[[], str],
        confirmed: Callable[[], bool],
    ) -> None:
        self._lost = lost
        self._measured = far
        self._digest = digest
        self._confirmed = confirmed
        self._far = 0.0
        self._next_s = 0.0  # time.monotonic, from which on it is told again
        super().__init__(*others)

    def part_ended(self, completed: int) -> None:
        if not self.refused and (why := self._lost()):
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
            self._far = self._measured()
            fields = self._how_far(delta.iteration)
        if not self._far and self._is_told(delta.iteration):
            fields += f',"proof":"{self._digest()}"'
        if fields:
            record = delta.record
            delta.record = lambda: with_fields(record(), fields)
        return True

    def _is_told(self, iteration: int) -> bool:
        now = time.monotonic()
        if now < self._next_s if self._confirmed() else iteration != self._pipeline.base + 1:
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
