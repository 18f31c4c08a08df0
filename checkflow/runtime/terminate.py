"""SIGTERM: let training come to its next step(), make that durable, then do what would have been done.

Only at a step() do the host's state and the tensors belong to one iteration. So where the last completed one is in no
checkpoint, the signal waits for the next one to end; where it is, or that takes too long, what is there is made
durable at once. Of several processes some may have no part of what was saved last: then one more step() is waited for.
After the deadline nothing is, nor the main thread, in which all this is done: where SIGTERM ends the process by
default, a thread that listens ends it then.
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
from checkflow.runtime.listener import SignalListener

Handler = Callable[[int, FrameType | None], object] | int

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
        end: ends the process as SIGTERM does, from any thread.
    """

    def __init__(
        self,
        act: MakeDurable,
        until: Callable[[float], float],
        inside: Inside,
        deadline_s: float,
        end: Callable[[], None],
    ) -> None:
        self.pending = False  # a signal waits for the next step()
        self.end = end
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
        if self._installed:
            _installed.add(self)

    @property
    def former(self) -> Handler:
        """What was there before."""
        return signal.SIG_DFL if self._previous is None else self._previous

    @property
    def is_installed(self) -> bool:
        return self._installed and os.getpid() == self._pid

    @property
    def allowed_s(self) -> float:
        """From the signal to when this has passed it on, or is not going to any more."""
        if not self.is_installed:
            return 0.0
        return max(self._deadline_s, _GRACE_S) if self._deadline is None else self._deadline_s + 2 * _GRACE_S

    def remove(self) -> None:
        """Put the former handler back, unless another one was installed since. A signal that waited goes to it."""
        was_installed, self._installed = self._installed, False
        if was_installed and threading.current_thread() is threading.main_thread():
            _put_back()
            _installed.remove(self)
        if self._deadline is not None:
            self._to_main()

    def reached_step(self) -> None:
        """An iteration ended while a signal was pending."""
        self._finish(at_step=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_installed:  # a forked child inherits the handler, not the training
            self._pass_on(number, frame)
            return
        if self._deadline is None:
            self._deadline = _installed.came(self) + self._deadline_s
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
        former = self.former
        if callable(former):
            former(number, frame)
        elif former != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            # A container's first process comes here: the kernel drops a signal that it does not handle.
            os._exit(128 + number)


class _Installed:
    """All of this process, of which each calls the one before it. One thread listens for all of them."""

    def __init__(self) -> None:
        self._all: list[OnTerminate] = []
        self._listener: SignalListener | None = None

    def add(self, one: OnTerminate) -> None:
        self._all.append(one)
        if self._listener is None:
            self._listener = SignalListener(signal.SIGTERM, _allowed_s, _end)

    def remove(self, one: OnTerminate) -> None:
        self._all.remove(one)
        if not self._all and self._listener is not None:
            self._listener.close()
            self._listener = None

    def came(self, to: OnTerminate) -> float:
        """When the signal did whose handler is called now: the main thread may have been long in coming to it."""
        if self._listener is None:
            return time.monotonic()
        self._listener.tell()
        since = self._listener.since
        return time.monotonic() if since is None or _first() is not to else since

    def forked(self) -> None:
        """In a child: SIGTERM does what it would have done without any of these."""
        if self._listener is not None:
            self._listener.forked()
            self._listener = None
        self._all.clear()
        _put_back()


_installed = _Installed()
os.register_at_fork(after_in_child=_installed.forked)


def _owner(handler: object) -> OnTerminate | None:
    """Whose handler it is."""
    found = getattr(handler, "__self__", None)
    return found if isinstance(found, OnTerminate) else None


def _first() -> OnTerminate | None:
    """Who gets the next signal, unless that is somebody else's handler."""
    return _owner(signal.getsignal(signal.SIGTERM))


def _put_back() -> None:
    """The newest handler that is still installed, or what was there before all of them."""
    first = _first()
    if first is None or first.is_installed:
        return
    handler = first.former
    while (owner := _owner(handler)) is not None and not owner.is_installed:
        handler = owner.former
    signal.signal(signal.SIGTERM, handler)


def _allowed_s() -> float | None:
    """From the signal to the process's end; None where that does not end it, or a handler that is not ours may not."""
    handler, allowed_s = signal.getsignal(signal.SIGTERM), 0.0
    if _owner(handler) is None:
        return None
    while (owner := _owner(handler)) is not None:
        handler, allowed_s = owner.former, allowed_s + owner.allowed_s
    return allowed_s if handler == signal.SIG_DFL else None


def _end() -> None:
    if (first := _first()) is not None:
        first.end()


def _signal_main() -> None:
    """Handlers run in the main thread only, which may be waiting in a system call."""
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGTERM)
