"""Where whole checkpoints go. The store implements it; the runtime knows no more of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from checkflow.state.names import StateName


class NamedSlot(Protocol):
    """Host memory for one checkpoint, or for its part of one lane. Its bytes stay where they are."""

    @property
    def index(self) -> int: ...

    def view(self, name: StateName) -> memoryview:
        """The bytes of the tensor with this state name, writable and flat."""


class Sink(Protocol):
    """Takes checkpoints. Errors of its own background work are raised by `poll`."""

    def try_acquire(self, lane: int = 0) -> NamedSlot | None:
        """A slot of a lane to fill, if one is free. May be asked again for the same checkpoint."""

    def acquire(self, lane: int = 0, completed: int | None = None) -> NamedSlot | None:
        """A slot of a lane to fill; waits for one if the sink is made to. None: this checkpoint is given up.

        `completed`: so many iterations, beyond which others cannot go while this waits.
        """

    def stage(self, slot: NamedSlot, iteration: int, record: bytes, *, whole: bool = True) -> None:
        """The slot holds the state as it was after `iteration` iterations; `record` is the host's part of it.

        Where there are lanes, its own part of it: with the slots staged right before, one of each other lane, the
        state is `whole`, or not yet.
        """

    def abandon(self, slot: NamedSlot) -> None:
        """The slot will not be filled."""

    def reclaim(self, but: Collection[int]) -> None:
        """Of all slots that were acquired, only these (by index) are still held by anybody."""

    def break_off(self) -> None:
        """Where there are lanes: the next checkpoint fills a slot of each, and goes on from none."""

    def pass_over(self, iteration: int) -> None:
        """There will be no checkpoint of this iteration, which was due as others know."""

    def poll(self) -> None:
        """Raise what went wrong in the background. Never blocks."""
