"""Where whole checkpoints go. The store implements it; the runtime knows no more of it."""

from __future__ import annotations

from typing import Literal, Protocol

Policy = Literal["skip", "block"]


class Slot(Protocol):
    """Host memory for one checkpoint. Its bytes stay where they are from one use to the next."""

    @property
    def index(self) -> int: ...

    def view(self, name: str) -> memoryview:
        """The bytes of the tensor with this state name, writable and flat."""


class Sink(Protocol):
    """Takes checkpoints. Errors of its own background work are raised by `poll`."""

    def acquire(self, policy: Policy) -> Slot | None:
        """A slot to fill. With "skip", None where none is free; with "block", waits for one."""

    def stage(self, slot: Slot, iteration: int, record: bytes) -> None:
        """The slot holds the whole state as it was after `iteration` iterations; `record` is the host's part of it."""

    def abandon(self, slot: Slot) -> None:
        """The slot will not be filled."""

    def poll(self) -> None:
        """Raise what went wrong in the background. Never blocks."""
