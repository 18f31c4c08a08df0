"""Ctrl-C where we let it through: an interrupt within a few steps that belong together would leave them half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_let_through: Callable[[], None] | None = None  # None: nothing is held back


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT takes effect at the end, or where `let_through` is called. It reaches Python in the main thread only."""
    global _let_through
    handler = signal.getsignal(signal.SIGINT)
    if _let_through is not None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[FrameType | None] = []

    def pass_on() -> None:
        if received:
            frame = received[0]
            received.clear()
            handler(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, lambda _, frame: received.append(frame))
    _let_through = pass_on
    try:
        yield
    finally:
        _let_through = None
        signal.signal(signal.SIGINT, handler)
        pass_on()


def let_through() -> None:
    """Here an interrupt may be raised. To be called where one waits."""
    if _let_through is not None and threading.current_thread() is threading.main_thread():
        _let_through()
