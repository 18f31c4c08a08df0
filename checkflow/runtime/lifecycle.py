"""What the executor is doing, as one value, and what may follow it; and when nothing of checkflow is in progress."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import FrameType

from checkflow.errors import InputError


class Phase(StrEnum):
    """One at a time."""

    IDLE = "idle"  # no checkpoint is being filled, or due when this iteration ends: hooks return at once
    FILLING = "filling"  # one is
    RESTORING = "restoring"  # the state is that of no iteration, or of one that has to be restored first: no step
    BROKEN = "broken"  # something was interrupted in the middle: what was in flight is given up
    CLOSED = "closed"  # hooks do nothing any more
    FORKED = "forked"  # a child's copy: the checkpoints are its parent's, and nothing here does anything


_NEXT = {
    Phase.IDLE: {Phase.FILLING, Phase.RESTORING, Phase.BROKEN, Phase.CLOSED},
    Phase.FILLING: {Phase.IDLE, Phase.RESTORING, Phase.BROKEN, Phase.CLOSED},
    Phase.RESTORING: {Phase.IDLE, Phase.FILLING, Phase.CLOSED},
    Phase.BROKEN: {Phase.IDLE, Phase.FILLING, Phase.RESTORING, Phase.CLOSED},
    Phase.CLOSED: set[Phase](),
    Phase.FORKED: set[Phase](),
}


class Lifecycle:
    """A phase, and why no step may be taken in it. In a forked child it is FORKED before any code of the child runs."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.refusal: str | None = None
        self.deaf = False  # hooks do nothing
        _all.add(self)

    def to(self, phase: Phase, refusal: str | None = None) -> None:
        """The only way from one phase to another."""
        if phase is not self.phase:
            assert phase in _NEXT[self.phase], f"{phase} cannot follow {self.phase}"
        self.phase, self.refusal = phase, refusal
        self.deaf = phase in (Phase.CLOSED, Phase.FORKED)

    def fork(self) -> None:
        """This is a child's copy."""
        self.phase, self.refusal, self.deaf = Phase.FORKED, "is its parent's in a forked process", True


_all: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def _fork_all() -> None:
    for lifecycle in tuple(_all):
        lifecycle.fork()


os.register_at_fork(after_in_child=_fork_all)


_WORKING = tuple(str(Path(__file__).parent.parent / part) for part in ("runtime", "checkpointing", "store"))


class Inside:
    """Entered by whoever works on checkpoints, one thread at a time. A signal handler has to wait until it is left:
    what it interrupts may hold a lock, or be half done."""

    def __init__(self) -> None:
        self.depth = 0
        self._lock = threading.RLock()
        self._later: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()
        if self._later is not None and not self.depth:
            self._run()

    def refuse(self, call: str) -> None:
        """Raises InputError where this thread is inside already, so that what it interrupts would wait for itself.

        The stack says so: an exception of a signal's handler on the way in or out leaves behind what is none.
        """
        if not self._is_mine():
            return
        if _works_above():
            raise InputError(
                f"{call}: something called it in the middle of step() or of a hook, as a signal's handler does; set a "
                "flag there, and call it in the training loop"
            )
        self.depth = 0
        while self._is_mine():
            self._lock.release()
        self._run()

    def _is_mine(self) -> bool:
        found: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return found

    def when_left(self, action: Callable[[], None]) -> None:
        """Run an action now, or when the work in progress ends."""
        self._later = action
        if not self.depth:
            self._run()

    def _run(self) -> None:
        action, self._later = self._later, None
        if action is not None:
            action()


def _works_above() -> bool:
    """Whether who called what is called now was itself called by code that works on checkpoints, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_ours(frame) or frame.f_code.co_filename == contextlib.__file__):  # the call itself
        frame = frame.f_back
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame is not None


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_WORKING)
