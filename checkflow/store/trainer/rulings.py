"""What a handle tells the other ranks of its checkpoints, and what their rulings do to its slots and its saver.

A ruling comes in another thread, maybe when the handle is closed, or is nobody's any more: then it does nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import OrderedDict

from checkflow.errors import PeerError
from checkflow.store.both.messages import VerifiedReport
from checkflow.store.both.words import AGREED, RESTORED, WAKE, numbered
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slots
from checkflow.store.trainer.peers import Peers
from checkflow.store.trainer.persist_every import MOST_S, Pace
from checkflow.store.trainer.sender import MirrorTarget, Sender
from checkflow.store.trainer.status import Tally
from checkflow.store.trainer.supervisor import Supervisor

_STAGED = 1000  # that may be read back yet
WAIT_S = 1.0  # where ranks end together they agree in milliseconds


class Rulings:
    """Of one handle, which alone keeps it."""

    def __init__(
        self, peers: Peers, shared: SharedMemory, slots: Slots, saver: Supervisor, pace: Pace, tally: Tally
    ) -> None:
        self._peers = peers
        self._shared = shared
        self._sender: Sender | None = None
        self._slots = slots
        self._saver = saver
        self._pace = pace
        self._tally = tally
        self._attempts: OrderedDict[int, int] = OrderedDict()  # of what was staged, by its sequence number
        self._unruled: dict[int, tuple[int, int]] = {}  # attempt and iteration, by sequence number
        self._owed: dict[int, float] = {}  # when it was ruled due, by sequence number, until all have verified it
        self._closed = False
        self._lock = threading.Lock()

    def mirror_at(self, target: MirrorTarget) -> None:
        """What is staged from now on counts once the mirror has it, too."""
        self._sender = Sender(self._shared, target)

    @property
    def target(self) -> MirrorTarget | None:
        """Whose mirror these slots have."""
        return None if self._sender is None else self._sender.target

    def check(self, waited_ns: int) -> None:
        """A slot is waited for that will be free once the other ranks have come as far. Raises PeerError in the end."""
        if waited_ns > 1e9 * self._peers.deadline_s:
            raise PeerError(
                f"step(): not every rank has come to it within {self._peers.deadline_s:g} s; call it on every rank, "
                "and see whether all run"
            )

    def follows(self, lag: int, whole_every: int) -> None:
        """From now on this rank has its part of a checkpoint `lag` iterations after that one, and reads none as a whole
        oftener than each so many iterations. Raises PeerError."""
        self._peers.lags(lag)
        self._peers.reads_whole(whole_every)

    def whole_every(self) -> int:
        """The greatest that any rank has said; 0 where the others cannot be reached, which is told elsewhere."""
        try:
            return self._peers.whole_every()
        except PeerError:
            return 0

    def awaits_this_rank(self, completed: int) -> bool:
        """Whether no ruling comes before this rank goes on: all end iterations together, and some rank has its part of
        the oldest checkpoint that is not ruled on only at the end of a later one."""
        unruled = self._unruled.copy().values()
        if not unruled or any(attempt != self._peers.attempt for attempt, _ in unruled):  # void without anybody's doing
            return False
        return self._peers.any_lags_more(completed - min(iteration for _, iteration in unruled))

    def part_staged(self, slot: int, iteration: int) -> None:
        """This slot will be part of a checkpoint that another one completes."""
        if self._sender is not None:
            self._sender.send(slot, self._shared.word(slot).sequence, iteration, None)

    def staged(self, slot: int, iteration: int) -> None:
        """The newest checkpoint, complete with this slot, is that of this iteration."""
        sequence, own = self._slots.newest_sequence or 0, weakref.ref(self)
        self._attempts[sequence] = self._peers.attempt
        self._unruled[sequence] = self._peers.attempt, iteration
        if len(self._attempts) > _STAGED:
            self._attempts.popitem(last=False)
        say = self._peers.staging(
            iteration,
            lambda: (here := own()) is not None and here._is_due(iteration),
            lambda due: None if (here := own()) is None else here._was_ruled(sequence, iteration, due),
        )
        if self._sender is None:
            say()
        else:
            self._sender.send(slot, sequence, iteration, say)

    def skipped(self, iteration: int) -> None:
        """No slot will have this one."""
        self._peers.skipped(iteration)

    def restored(self, serial: int) -> None:
        """Every rank has verified its part of this checkpoint, which is on this rank's disk."""
        self._owed.clear()
        self._tell(numbered(RESTORED, serial))

    def read_back(self) -> str | None:
        """Tell what the saver has read back, and return what troubles the ranks, if there is something."""
        if self._sender is not None:
            while self._sender.sent:
                sent = self._sender.sent.popleft()
                self._tally.mirror(sent.iteration, sent.size_bytes, sent.send_ns)
            while self._sender.trouble:
                self._saver.fail(self._sender.trouble.popleft())
        while self._saver.verified:
            report = self._saver.verified.popleft()
            self._tell_verified(report)
        if (failure := self._peers.failure()) is not None:
            self._saver.fail(failure)
        return self._peers.trouble()

    def wait(self, deadline: float) -> None:
        """Until the other ranks have come as far, so that no more than the newest has to be made durable; not long."""
        until = min(deadline, time.monotonic() + WAIT_S)
        while self._slots.awaits_agreement and time.monotonic() < until:
            self._saver.wait(0.002)

    def await_mirror(self, limit_s: float) -> None:
        """Until the mirror has what was staged, or it is known that it never will: a large checkpoint takes a while."""
        until = time.monotonic() + limit_s
        while self._sender is not None and self._sender.pending and time.monotonic() < until:
            self._saver.wait(0.01)

    def newest_is_void(self) -> bool:
        """Whether some rank never will have its part of what was staged last. Waits a moment where that is open."""
        self.wait(math.inf)
        return self._slots.newest_is_void

    def close(self) -> None:
        """Nothing touches the slots any more."""
        if self._sender is not None:
            self._sender.close()
        with self._lock:
            self._closed = True

    def _is_due(self, iteration: int) -> bool:
        return not self._owes_enough and self._pace.due(iteration, time.monotonic(), self._tally.last_persist_s)

    @property
    def _owes_enough(self) -> bool:
        """Whether one more that is due would take the slot that the next checkpoint is to fill: some rank's disk is
        slow, or refuses. What is not verified after so long is given up, or will not be."""
        most, now = self._slots.most_due, time.monotonic()
        return most is not None and sum(now - ruled < MOST_S for ruled in tuple(self._owed.values())) >= most

    def _was_ruled(self, sequence: int, iteration: int, due: bool | None) -> None:
        """Every rank has staged its part, or some rank never will."""
        self._unruled.pop(sequence, None)
        if due is not None and (due or not self._owes_enough):  # else the next one may be due in its place
            self._pace.ruled(iteration, time.monotonic(), due=due)
        if due:
            self._owed[sequence] = time.monotonic()
        if due is None:
            self._attempts.pop(sequence, None)  # that this rank has verified its part is nothing to the others
        with self._lock:
            if self._closed:
                return
            if due is None:
                self._slots.disown(sequence)
            else:
                self._slots.agree(sequence, due=due)
                if self._sender is not None:
                    self._sender.agreed = True
            if due:
                self._tell(WAKE)

    def _tell_verified(self, report: VerifiedReport) -> None:
        """Of the attempt in which it was staged: since then there may have been a restore."""
        own, sequence = weakref.ref(self), report.sequence
        if (attempt := self._attempts.get(sequence)) is None:
            return
        self._peers.verified(
            attempt,
            report.iteration,
            report.serial,
            lambda: None if (here := own()) is None else here._may_prune(sequence),
        )

    def _may_prune(self, sequence: int) -> None:
        for older in [each for each in tuple(self._owed) if each <= sequence]:
            self._owed.pop(older, None)
        with self._lock:
            if not self._closed:
                self._tell(numbered(AGREED, sequence))

    def _tell(self, word: bytes) -> None:
        """The saver may end meanwhile, and its socket be closed."""
        with contextlib.suppress(OSError):
            self._saver.tell(word)
