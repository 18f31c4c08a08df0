"""What was staged for a replica and is not whole yet: the saver waits for who makes it so, or tells that it is lost.

While the trainer lives, that is its business. Of a dead one's the process that makes them runs on, or is started again
here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from checkflow.store.both.beside import Beside
from checkflow.store.both.messages import FailedReport, Message
from checkflow.store.both.stillness import Stillness
from checkflow.store.memory.replica_slots import can_step, deltas_in, forget_trainer, give_up_deltas, is_held
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.replica import start_replica
from checkflow.text import plain

PATIENT_S = 120.0  # without a step that could be made
STARTS = 3


class Awaited:
    """Deltas in a trainer's memory. `store`: its path, for messages."""

    def __init__(self, shared: SharedMemory, store: Path, report: Callable[[Message], None]) -> None:
        self._shared = shared
        self._store = store
        self._report = report
        self._still = Stillness(PATIENT_S)
        self._starts = 0
        self._process: Beside | None = None
        self._end: socket.socket | None = None

    def any_due(self) -> bool:
        """Whether one is, which its trainer sees to."""
        return any(word.due for word in deltas_in(self._shared.words()))

    def any_left(self) -> bool:
        """Whether a dead trainer has left any that is still to be had: what is not is given up, and told."""
        words = self._shared.words()
        if not deltas_in(words):
            return False
        forget_trainer(self._shared)
        hangs = self._still.exceeds(self._shared.steps if can_step(words) else None)
        if not hangs and (is_held(self._shared) or self._start()):
            return True
        lost = give_up_deltas(self._shared)
        if lost:
            why = f"the process that brings the replica on {self._how_it_ended()}"
            what = f"the last {len(lost)} iterations that were staged are lost"
            self._report(FailedReport(sequence=lost[-1].sequence, message=f"{self._store}: {what}: {why}"))
        return False

    def _start(self) -> bool:
        """Start another process; False where that is no use."""
        if self._starts >= STARTS:
            return False
        self._starts += 1
        try:
            self._process, self._end = start_replica(self._shared)
        except OSError:
            return False
        self._end.shutdown(socket.SHUT_WR)  # which it takes for the trainer's end
        return True

    def _how_it_ended(self) -> str:
        said = ""
        if self._end is not None:
            with contextlib.suppress(OSError):
                said = self._end.recv(2**16, socket.MSG_DONTWAIT).decode(errors="replace")
        return f"says: {plain(said, 500)}" if said else "died, or does not move; check memory limits"
