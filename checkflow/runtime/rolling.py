"""A checkpoint each iteration, of which each iteration fills a part: slots of K lanes in turn.

A part is exact under the same conditions as one of several iterations (parts.py). In each iteration the slot of its
lane takes the parameters of that lane as they are at its end, and the gradients of all others. So with the K - 1
slots before it, it completes a checkpoint. The first one is read at once, and so is the one after any that was skipped:
it fills a slot of each lane. Those that follow it are proven until parts of every age were, and one now and then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.parts import Parts
from checkflow.schedule import Schedule
from checkflow.state.host.updates import Updates


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

    def factored(
        self, running: int, name: str, gradient: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        if self._pipeline.goes_on(running):
            self._pipeline.open(running)
        super().factored(running, name, gradient, factors)

    def part_ended(self, completed: int) -> None:
        self._iteration_ended()
        if not self.refused and (text := self._part_text()) is not None:
            self._history.forget_before(completed - self._pipeline.lanes)
            self._history.add_part(completed, (), text)

    def resumed(self) -> None:
        """The iterations after the restored one are made again, and other updates with them."""
        super().resumed()
        self._history = Updates()

    def prove(self) -> bool:
        checkpoint = self._pipeline.newest
        again = self._proven_age == self._pipeline.lanes - 1
        if checkpoint is None or (again and not self._is_due_again()):
            return True
        iteration = checkpoint.iteration
        backs = self._backs(iteration)
        if max(backs) < self._proven_age + (not again):
            return True
        self._proven_age, replay = max(backs), self._history.text(iteration, self._saved(backs, iteration))
        return self._holds(replay, self._pipeline.chain, backs, again=again)

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
