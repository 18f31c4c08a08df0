"""SIGTERM: let training come to its next step(), make that durable, then do what would have been done.

Only at a step() do the host's state and the tensors belong to one iteration. So where the last completed one is in no
checkpoint, the signal waits for the next one to end; where it is, or that takes too long, what is there is made
durable at once. Of several processes some may have no part of what was saved last: then one more step() is waited for.
After the deadline nothing is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from checkflow.runtime.lifecycle import Inside

_GRACE_S = 1.0  # for `act` to end at the deadline by itself


class MakeDurable(Protocol):
    def __call__(self, deadline: float, *, at_step: bool, is_last: bool) -> float:
        """Make durable what can be until a deadline (of time.monotonic). `at_step`: an iteration has just ended.

        Returns until when the next step() is to be waited for all the same, 0 where it is not; not if `is_last`.
        """


class OnTerminate:
    """Installed for SIGTERM until removed. Outside of the main thread, where Python allows no handlers, it is not.

    Args:
        act: see there.
        until: given the deadline, until when the next step() is worth waiting for; 0: not at all.
        inside: work that a signal must not interrupt with more of it.
        deadline_s: from the signal to what would have been done without this.
    """

    def __init__(self, act: MakeDurable, until: Callable[[float], float], inside: Inside, deadline_s: float) -> None:
        self.pending = False  # a signal waits for the next step()
        self._act = act
        self._until = until
        self._inside = inside
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._deadline: float | None = None  # of the signal that was received
        self._impatient = self._acting = self._acted = False
        self._passed_on = threading.Event()
        self._installed = threading.current_thread() is threading.main_thread()
        self._previous = signal.signal(signal.SIGTERM, self._handle) if self._installed else None

    def remove(self) -> None:
        """Put the former handler back, unless another one was installed since. A signal that waited goes to it."""
        main = threading.current_thread() is threading.main_thread()
        if self._installed and main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        self._installed = False
        if self._deadline is not None:
            self._to_main()

    def reached_step(self) -> None:
        """An iteration ended while a signal was pending."""
        self._finish(at_step=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or not self._installed:  # a forked child inherits the handler, not the training
            self._pass_on(number, frame)
            return
        if self._deadline is None:
            self._deadline = time.monotonic() + self._deadline_s
            self._alarm(self._deadline + _GRACE_S)
            self._inside.when_left(self._begin)
        elif self._acted or time.monotonic() >= self._deadline:
            self._forget()
            self._pass_on(number, frame)
        elif self._impatient:
            self._inside.when_left(self._give_up)

    def _begin(self) -> None:
        assert self._deadline is not None
        if (until := self._until(self._deadline)) > time.monotonic():
            self._await_step(until)
        else:
            self._finish(at_step=False)

    def _await_step(self, until: float) -> None:
        self.pending = True
        self._alarm(until)

    def _give_up(self) -> None:
        if self.pending:
            self._finish(at_step=False)

    def _finish(self, *, at_step: bool) -> None:
        if self._deadline is None or self._acting:
            return
        self._acting, self.pending = True, False
        until = 0.0
        try:
            until = self._act(self._deadline, at_step=at_step, is_last=self._impatient)
        finally:
            if self._deadline is not None and until:
                self._acting = False
                self._await_step(until)
            elif self._deadline is not None:  # else it was passed on at the deadline, in the middle of this
                self._acted = True
                self._to_main()

    def _alarm(self, moment: float) -> None:
        """Signal again then, unless the signal was passed on."""
        passed_on = self._passed_on

        def wait() -> None:
            if not passed_on.wait(max(0.0, moment - time.monotonic())):
                self._impatient = True
                _signal_main()

        threading.Thread(target=wait, name="checkflow-sigterm", daemon=True).start()

    def _to_main(self) -> None:
        """The former handler is the main thread's."""
        if threading.current_thread() is threading.main_thread():
            self._forget()
            self._pass_on(signal.SIGTERM, None)
        else:
            _signal_main()

    def _forget(self) -> None:
        """A later signal begins anew: the former handler may have let training go on."""
        self._passed_on.set()
        self._passed_on = threading.Event()
        self._deadline = None
        self.pending = self._impatient = self._acting = self._acted = False

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            # A container's first process comes here: the kernel drops a signal that it does not handle.
            os._exit(128 + number)


def _signal_main() -> None:
    """Handlers run in the main thread only, which may be waiting in a system call."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGTERM)
