"""Starting the process that brings the replica on, seeing it end, and ending it. Training never waits for it."""

from __future__ import annotations

import socket

from checkflow.errors import StoreError
from checkflow.store.both.beside import unstarted
from checkflow.store.both.stillness import Stillness
from checkflow.store.memory.replica_slots import can_step
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.replica import start_replica
from checkflow.text import plain

END_S = 10.0
HANG_S = 120.0
QUIET_DEATHS = 3  # in a row, with no step in between: after as many it is given up


class ReplicaProcess:
    """`lost`: why nothing is made of deltas any more; "" where it is."""

    def __init__(self, shared: SharedMemory) -> None:
        """Start it. Raises StoreError where it cannot be started."""
        self.lost = ""
        self._shared = shared
        self._deaths = 0  # in a row
        self._steps = 0  # when it died last
        self._still = Stillness(HANG_S)
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tend(self) -> None:
        """Start another one where it has died; give it up where it says why, or dies again and again. Never waits.

        One that has something to do and does not get on is killed.
        """
        if self.lost:
            return
        if not self._process.has_ended():
            has_work = can_step(self._shared.words())
            if self._still.exceeds((self._shared.steps, self.pid) if has_work else None):
                self._process.kill()
            return
        said = self._said()
        self._end.close()
        if said:
            self.lost = said
            return
        self._deaths = 1 if self._shared.steps != self._steps else self._deaths + 1
        self._steps = self._shared.steps
        if self._deaths >= QUIET_DEATHS:
            how = self._process.how_it_ended()
            self.lost = (
                f"its process died {self._deaths} times in a row (last: {how}); check memory limits, and the machine"
            )
            return
        try:
            self._start()
        except StoreError as error:
            self.lost = str(error)

    def close(self) -> None:
        """End it; what it works at is let go of."""
        self._end.close()
        if not self._process.wait(END_S):
            self._process.kill()
            self._process.wait(END_S)

    def disown(self) -> None:
        """Close our end: it takes that for the trainer's, unless this is a forked child and its parent has it."""
        self._end.close()

    def _start(self) -> None:
        try:
            self._process, self._end = start_replica(self._shared)
        except OSError as error:
            raise unstarted("replica: no process can be started", error) from None

    def _said(self) -> str:
        """Its last word."""
        try:
            return plain(self._end.recv(2**16, socket.MSG_DONTWAIT).decode(errors="replace"), 1000)
        except OSError:
            return ""
