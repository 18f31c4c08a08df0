"""Tells events to the log and to the user's callback: on the training's thread, outside of hooks, in their order.

Whoever sees something happen adds to the events that wait, in whatever thread; only `tell` takes from them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from checkflow.errors import InputError
from checkflow.events import Event, Failed, Stalled
from checkflow.runtime.counters import Counters
from checkflow.text import plain

STALL_NS = 1_000_000  # what is shorter is no event
_LOG = logging.getLogger("checkflow")
_LOG.addHandler(logging.NullHandler())  # what nobody listens to is on stderr only by `tell` and `notify`


class Narrator:
    """`events` wait to be told; `tell` is called where no checkpoint is being worked on. `telling`: it runs."""

    def __init__(
        self, store: Path, events: deque[Event], on_event: Callable[[Event], object] | None, counters: Counters
    ) -> None:
        self.events = events
        self._store = store
        self._on_event = on_event
        self._counters = counters
        self._stall_ns = 0
        self._stalls = dict(counters.stall_ns)
        self.telling = False

    def ended(self, iteration: int) -> None:
        """An iteration ended: what it waited for is known."""
        total = self._counters.stall_ns.total()
        if total - self._stall_ns >= STALL_NS:
            now = dict(self._counters.stall_ns)
            causes = {str(cause): ns - self._stalls.get(cause, 0) for cause, ns in now.items()}
            waited = {cause: ns for cause, ns in causes.items() if ns}
            self.events.append(Stalled(iteration, total - self._stall_ns, waited))
            self._stalls = now
        self._stall_ns = total

    def failed(self, iteration: int, error: Exception) -> None:
        """This is about to be raised. The store may have said so already."""
        message = str(error) or type(error).__name__
        if not any(isinstance(event, Failed) and event.message == message for event in self.events):
            self.events.append(Failed(iteration, message))

    def tell(self) -> None:
        """Everything that waits. Raises InputError for what the callback raised, which is not called again."""
        problem: InputError | None = None
        try:
            self.telling = True
            while self.events:
                event = self.events.popleft()
                if _LOG.isEnabledFor(event.level):
                    _LOG.log(event.level, "%s: %s", self._store, plain(str(event)))
                if self._on_event is None:
                    continue
                try:
                    self._on_event(event)
                except Exception as error:  # noqa: BLE001 (the user's own; it costs no checkpoint)
                    problem = InputError(
                        f"on_event: {_name_of(self._on_event)} raised {type(error).__name__} for {type(event).__name__}"
                        f" of iteration {event.iteration} ({error}) and is not called again; mend it"
                    )
                    problem.__cause__ = error
                    self._on_event = None
        finally:
            self.telling = False
        if problem is not None:
            raise problem


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
