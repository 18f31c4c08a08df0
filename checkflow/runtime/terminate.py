"""SIGTERM: finish what is in flight, then do what would have been done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class OnTerminate:
    """Calls `act` when SIGTERM arrives, then the handler that was there before; by default that ends the process.

    Outside of the main thread, where Python allows no handlers, nothing is installed.
    """

    def __init__(self, act: Callable[[], None], when_safe: Callable[[Callable[[], None]], None]) -> None:
        self._act = act
        self._when_safe = when_safe
        self._pid = os.getpid()
        self._installed = threading.current_thread() is threading.main_thread()
        self._previous = signal.signal(signal.SIGTERM, self._handle) if self._installed else None

    def remove(self) -> None:
        """Put the former handler back, unless another one was installed since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker inherits the handler, not the training
            self._pass_on(number, frame)
        else:
            self._when_safe(lambda: self._terminate(number, frame))

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        try:
            self._act()
        finally:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
