"""Keeping a saver running: hear it, start it again if it dies, notice if it hangs, end it in time."""

from __future__ import annotations

import time

from checkflow.errors import StoreError
from checkflow.store.interrupts import let_through
from checkflow.store.lock import StoreLock
from checkflow.store.messages import CLOSE, Durable, Failed, Verified
from checkflow.store.process import SaverProcess
from checkflow.store.shared import SharedMemory
from checkflow.store.slots import Slots
from checkflow.store.tally import Tally

MAX_DEATHS = 3  # in a row, with nothing made durable in between


class Supervisor:
    """The trainer's saver. What goes wrong is collected in `errors`, one line each, for whoever delivers them."""

    def __init__(self, shared: SharedMemory, slots: Slots, lock: StoreLock, tally: Tally, hang_s: float) -> None:
        """Start a saver. Raises StoreError where no process can be started."""
        self._shared = shared
        self._slots = slots
        self._lock = lock
        self._tally = tally
        self._hang_s = hang_s
        self._deaths = 0
        self._seen_progress = (-1, time.monotonic())
        self._saver: SaverProcess | None = SaverProcess(shared, lock)
        self.hangs = False
        self.errors: list[str] = []
        self.failed: set[int] = set()  # sequence numbers that could not be made durable

    @property
    def pid(self) -> int | None:
        """The saver's; None once it is given up or ended."""
        return None if self._saver is None else self._saver.pid

    def fail(self, message: str) -> None:
        """Collect an error."""
        self._tally.errors += 1
        self.errors.append(message)

    def tell(self, word: bytes) -> None:
        """Say a word to the saver, if there is one. Never waits."""
        if self._saver is not None:
            self._saver.tell(word)

    def wait(self, timeout_s: float) -> None:
        """Until the saver says something or ends, or the time has passed."""
        if self._saver is not None:
            self._saver.stirs(timeout_s)
        let_through()

    def tend(self) -> None:
        """Hear the saver, restart it if it died, see whether it hangs. Never waits."""
        if self._saver is None:
            return
        how = self._saver.ended()
        if how is not None or self._saver.stirs(0):
            self._listen(self._saver)
        if how is not None:
            self._saver.close()
            self._restart(how)
        self._watch()

    def end(self, deadline: float) -> None:
        """Have the saver finish what is due and end; kill it at the deadline (of time.monotonic)."""
        saver = self._saver
        if saver is None:
            return
        saver.tell(CLOSE)
        while saver.ended() is None and time.monotonic() < deadline:
            self.wait(min(0.1, deadline - time.monotonic()))
            self._listen(saver)
        if not saver.wait(0):
            saver.kill()
            saver.wait(1.0)
            self.fail("the saver did not end by the deadline and was killed; check the disk, or give a later deadline")
        self._listen(saver)
        saver.close()
        self._saver = None

    def disown(self) -> None:
        """Close the socket: the saver takes that for our end, unless this is a forked child and its parent has it."""
        if self._saver is not None:
            self._saver.close()

    def _listen(self, saver: SaverProcess) -> None:
        for message in saver.messages():
            if isinstance(message, Durable):
                self._deaths = 0
                self._tally.persist(message.iteration, message.size_bytes, message.write_ns)
            elif isinstance(message, Verified):
                self._tally.verify(message.iteration, message.verify_ns, message.pruned)
            elif isinstance(message, Failed):
                self.failed.add(message.sequence)
                self.fail(message.message)

    def _restart(self, how: str) -> None:
        self._saver = None
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            self.fail(
                f"the saver process died {self._deaths} times in a row (last: {how}); nothing more is made durable; "
                "check memory limits and the disk"
            )
            return
        self._tally.restarts += 1
        try:
            self._saver = SaverProcess(self._shared, self._lock)
        except StoreError as error:
            self.fail(str(error))

    def _watch(self) -> None:
        """A saver that has work and does not move hangs: told once, until it moves."""
        now, progress = time.monotonic(), self._shared.progress
        if progress != self._seen_progress[0] or not self._slots.pending:
            self._seen_progress = (progress, now)
            self.hangs = False
        elif not self.hangs and now - self._seen_progress[1] > self._hang_s:
            self.hangs = True
            self.fail(f"the saver has not moved for {self._hang_s:g} s; the disk may hang: check it")
