"""A checkpoint each iteration, of which each iteration fills a part: slots of K lanes in turn, or what a replica needs.

A part is exact under the same conditions as one of several iterations (parts.py). In each iteration the slot of its
lane takes the parameters of that lane as they are at its end, and the gradients of all others. So with the K - 1
slots before it, it completes a checkpoint. The first one is read at once, and so is the one after any that was skipped:
it fills a slot of each lane. Those that follow it are proven until parts of every age were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.parts import Parts
from checkflow.schedule import Schedule
from checkflow.state.host.updates import Updates, with_fields


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


@dataclass(frozen=True, slots=True)
class Vouched:
    """What is known of the host's first update: a digest of what it has to make, or how far it is from that."""

    proof: str = ""
    far: float = 0.0  # in units of the largest number in the same tensor


class Replicated(Rolling):
    """Of one executor whose schedule has a replica: each iteration's slot has gradients, and what none rebuilds.

    The first checkpoint is read as a whole, and so is the one after any that was skipped.

    Args:
        lost: why the host makes no updates any more; "" where it does.
        vouch: asked when the first update was proven.
        others: those of Rolling.
    """

    def __init__(self, *others: Any, lost: Callable[[], str], vouch: Callable[[], Vouched]) -> None:
        self._lost = lost
        self._vouch = vouch
        self._vouched = Vouched()
        super().__init__(*others)

    def part_ended(self, completed: int) -> None:
        if not self.refused and (why := self._lost()):
            self.refuse(why)
        super().part_ended(completed)

    def prove(self) -> bool:
        proven = self._proven_age
        holds = super().prove()
        delta = self._pipeline.newest
        if holds and self._proven_age > proven and delta is not None and delta.record is not None:
            self._vouched = self._vouch()
            record, proof = delta.record, f',"proof":"{self._vouched.proof}"' if self._vouched.proof else ""
            fields = proof + self._how_far(delta.iteration)
            delta.record = lambda: with_fields(record(), fields)
        return holds

    def _backs(self, iteration: int) -> list[int]:
        return [int(iteration != self._pipeline.base), 0]

    def _beside(self, iteration: int) -> str:
        return super()._beside(iteration) + self._how_far(iteration) if any(self._backs(iteration)) else ""

    def _how_far(self, iteration: int) -> str:
        updates, far = iteration - self._pipeline.base, self._vouched.far
        return f',"approximate":{{"updates":{updates},"each":{far!r}}}' if far else ""
