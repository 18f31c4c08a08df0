"""Keeping a saver running, and the replica's process: hear it, notice if it hangs, end it in time."""

from __future__ import annotations

import time
from collections import deque

from checkflow.interrupts import let_through
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.messages import DurableReport, FailedReport, Notice, VerifiedReport
from checkflow.store.both.stillness import Stillness
from checkflow.store.both.words import CLOSE, NOW, WAKE
from checkflow.store.memory.replica_slots import give_up_deltas
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slots
from checkflow.store.trainer.keeper import Keeper, News
from checkflow.store.trainer.lingering import Lingering
from checkflow.store.trainer.replica_process import ReplicaProcess
from checkflow.store.trainer.saver_process import SaverProcess
from checkflow.store.trainer.status import Tally


class Supervisor:
    """The trainer's saver. What goes wrong is collected in `news`, for whoever delivers it."""

    def __init__(
        self, shared: SharedMemory, slots: Slots, lock: StoreLock, tally: Tally, *, hang_s: float, retry_s: float,
        replica: bool = False,
    ) -> None:  # fmt: skip
        """Start a saver, and where there is a `replica` what brings it on. Raises StoreError where one cannot be."""
        self._shared = shared
        self._slots = slots
        self._tally = tally
        self._hang_s = hang_s
        self._still = Stillness(hang_s)
        self._ended = self._is_awake = False
        self.hangs = False
        self.news: deque[News] = deque()  # the keeper's thread adds to it, too
        self.verified: deque[VerifiedReport] = deque(maxlen=100)  # read back, for whoever tells the other ranks
        self.failed: set[int] = set()  # sequence numbers that could not be made durable
        self.replica = ReplicaProcess(shared) if replica else None
        self._keeper = Keeper(
            lambda: SaverProcess(shared, lock), lambda: shared.durable_sequence, retry_s, self.news.append
        )

    @property
    def pid(self) -> int | None:
        """The saver's; None between two, and once it is ended."""
        saver = self._keeper.saver
        return None if saver is None or self._ended else saver.pid

    @property
    def is_lost(self) -> bool:
        """Whether no saver runs, and none has stayed alive for longer than it is tried."""
        return self._ended or self._keeper.is_hopeless

    @property
    def deaths(self) -> int:
        """Of savers, since the store was opened."""
        return self._keeper.deaths

    def fail(self, message: str) -> None:
        """Collect an error."""
        self.news.append(News(message, is_error=True))

    def tell(self, word: bytes) -> None:
        """Say a word to the saver, if there is one. Never waits."""
        saver = self._keeper.saver
        if saver is not None and not self._ended:
            saver.tell(word)

    def wake(self) -> None:
        """A slot is about to be filled. Until then the saver has no work, and has not even begun to import."""
        if not self._is_awake:
            self.tell(WAKE)
            self._is_awake = True

    def ask_again(self, sequence: int) -> None:
        """What has failed of it was told; what is heard from now on is of another attempt."""
        self.tend()
        self.failed.discard(sequence)

    def hurry(self) -> None:
        """What waits to be tried again is tried now."""
        self.tell(NOW)
        if not self._ended:
            self._keeper.hurry()

    def wait(self, timeout_s: float) -> None:
        """Until the saver says something or ends, or the time has passed."""
        saver = self._keeper.saver
        if saver is not None:
            saver.stirs(timeout_s)
        else:
            time.sleep(max(0.0, timeout_s))
        let_through()

    def tend(self) -> None:
        """Hear the saver and its predecessors, see whether it hangs. Never waits."""
        if self._ended:
            return
        self._bury()
        self._tend_replica()
        saver = self._keeper.saver
        if saver is not None and saver.stirs(0):
            self._listen(saver)
        self._tally.restarts = self._keeper.starts - 1
        self._watch()

    def end(self, deadline: float, lingering: Lingering) -> None:
        """Have the saver finish what is due and end; kill it at the deadline (of time.monotonic)."""
        if self._ended:
            return
        self._ended = True
        if self.replica is not None:
            self.replica.close()
            self._give_up_deltas(self.replica.lost or "the run ended before that was done")
        self._keeper.end()
        self._bury()
        saver = self._keeper.saver
        if saver is None:
            return
        try:
            saver.tell(CLOSE)
            while saver.ended() is None and time.monotonic() < deadline:
                self.wait(min(0.1, deadline - time.monotonic()))
                self._listen(saver)
                lingering.until("what was written is read back, and older checkpoints are removed")
            if not saver.wait(0):
                saver.kill()
                saver.wait(1.0)
                self.fail(
                    "the saver did not end by the deadline and was killed; check the disk, or give a later deadline"
                )
            self._listen(saver)
        finally:
            saver.close()  # also if we are interrupted: it goes on by itself then

    def disown(self) -> None:
        """Close what is open: the saver takes that for our end, unless this is a forked child and its parent has it."""
        if not self._ended:
            self._ended = True
            if self.replica is not None:
                self.replica.disown()
            self._keeper.disown()

    def _tend_replica(self) -> None:
        """Where it is given up, so is what it has not done."""
        if self.replica is None or self.replica.lost:
            return
        self.replica.tend()
        if self.replica.lost:
            self._give_up_deltas(self.replica.lost)

    def _give_up_deltas(self, why: str) -> None:
        for word in give_up_deltas(self._shared):
            if word.due:
                self.failed.add(word.sequence)
                self.fail(f"a checkpoint that was due is lost: the replica is not brought on ({why})")

    def _bury(self) -> None:
        while self._keeper.dead:
            saver = self._keeper.dead.popleft()
            self._listen(saver)
            saver.close()

    def _listen(self, saver: SaverProcess) -> None:
        for message in saver.messages():
            if isinstance(message, DurableReport):
                self._tally.persist(message.iteration, message.size_bytes, message.written_bytes, message.write_ns)
            elif isinstance(message, VerifiedReport):
                self._tally.verify(message.iteration, message.verify_ns, message.pruned)
                self.verified.append(message)
            elif isinstance(message, FailedReport):
                self.failed.add(message.sequence)
                self.fail(message.message)
            elif isinstance(message, Notice):
                self.news.append(News(message.message, is_error=False))

    def _watch(self) -> None:
        """A saver that has work and does not move hangs: told once, until it moves."""
        has_work = self._slots.pending and self._keeper.saver is not None
        was_told = self.hangs
        self.hangs = self._still.exceeds((self._shared.progress, self._keeper.deaths) if has_work else None)
        if self.hangs and not was_told:
            self.fail(f"the saver has not moved for {self._hang_s:g} s; the disk may hang: check it")
