"""Handlers of signals raise at any line: within a few steps that belong together they would leave them half done.

Ctrl-C's does. So may a program's own: of SIGTERM, of SIGALRM to give up after a time, of SIGUSR1.

One interrupt at any moment finds these steps done, or undone by their `finally`; a second, while the first is raised,
may not. Handlers run in the main thread only, so that other threads need none of this.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

P = TypeVar("P", "subprocess.Popen[bytes]", "subprocess.Popen[str]")
_RAISE = (
    signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM,
)  # fmt: skip
_LOOK_S = 0.1  # while one sleeps


class _Held:
    """The program's handlers, and what was received in their place."""

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        found = {number: signal.getsignal(number) for number in numbers}
        self.handlers = {number: handler for number, handler in found.items() if callable(handler)}
        self._received: list[tuple[int, FrameType | None]] = []

    def hold(self) -> None:
        for number in self.handlers:
            signal.signal(number, lambda received, frame: self._received.append((received, frame)))

    def release(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.pass_on()

    def pass_on(self) -> None:
        """One that raises leaves none out."""
        if self._received:
            number, frame = self._received.pop(0)
            try:
                self.handlers[signal.Signals(number)](number, frame)
            finally:
                self.pass_on()


_held: _Held | None = None


def _ours() -> _Held | None:
    return _held if threading.current_thread() is threading.main_thread() else None


@contextmanager
def held_back(*, sigterm: bool) -> Iterator[None]:
    """Signals' handlers, which nobody may change meanwhile, run at the end, or where they are let through.

    `sigterm`: SIGTERM's, too. Not for long work: checkflow's own handler raises nothing, and has a deadline to keep.
    """
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held((*_RAISE, signal.SIGTERM) if sigterm else _RAISE)
    try:
        _held = held
        held.hold()
        yield
    finally:
        _held = None
        held.release()


def let_through() -> None:
    """Here an interrupt may be raised. To be called where one waits in short steps."""
    if held := _ours():
        held.pass_on()


def sleep(seconds: float) -> None:
    """An interrupt may be raised meanwhile."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left_s))
        let_through()


@contextmanager
def let_through_meanwhile() -> Iterator[None]:
    """Within this it is raised at once. For what waits, and leaves nothing half done."""
    held = _ours()
    if held is None:
        yield
        return
    try:
        held.release()
        yield
    finally:
        held.hold()


@contextmanager
def killed_at_the_end(start: Callable[[], P]) -> Iterator[P]:
    """A process that ends with the block. An interrupt is raised in the block, never while the process is nobody's."""
    with held_back(sigterm=True):
        process = start()
        try:
            with let_through_meanwhile():
                yield process
        finally:
            process.kill()
            process.wait()
