"""Where whole checkpoints go. The store implements it; the runtime knows no more of it."""

from __future__ import annotations

from typing import Protocol

from checkflow.state.names import StateName


class NamedSlot(Protocol):
    """Host memory for one checkpoint. Its bytes stay where they are from one use to the next."""

    @property
    def index(self) -> int: ...

    def view(self, name: StateName) -> memoryview:
        """The bytes of the tensor with this state name, writable and flat."""


class Sink(Protocol):
    """Takes checkpoints. Errors of its own background work are raised by `poll`."""

    def try_acquire(self) -> NamedSlot | None:
        """A slot to fill, if one is free. May be asked again for the same checkpoint."""

    def acquire(self) -> NamedSlot | None:
        """A slot to fill; waits for one if the sink is made to. None: this checkpoint is given up."""

    def stage(self, slot: NamedSlot, iteration: int, record: bytes) -> None:
        """The slot holds the whole state as it was after `iteration` iterations; `record` is the host's part of it."""

    def abandon(self, slot: NamedSlot) -> None:
        """The slot will not be filled."""

    def poll(self) -> None:
        """Raise what went wrong in the background. Never blocks."""
