"""The trainer's handle on a store: slots to fill, a saver that persists them, and what became of it.

    handle = StoreHandle.open(path, [Layout.of(files)])
    slot = handle.acquire()                          # fill slot.view(file, tensor)
    handle.stage(slot, iteration, record)            # a killed trainer no longer loses it
    handle.poll()                                    # raises what went wrong in the background
    handle.close()                                   # the newest staged checkpoint is durable

One thread calls these; `acquire`, `drain` and `close` alone ever wait.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from checkflow.errors import InputError, StoreError
from checkflow.events import Event
from checkflow.interrupts import held_back
from checkflow.store.both.config import BucketConfig, SaverConfig
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.retry import RETRY_S
from checkflow.store.both.saver_log import take_log
from checkflow.store.both.words import LAST, WAKE
from checkflow.store.format.layout import Layout
from checkflow.store.format.reader import Checkpoint
from checkflow.store.format.retention import Retention
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slot, Slots, WhenFull
from checkflow.store.trainer.bucket_process import BucketProcess
from checkflow.store.trainer.delivery import Delivery, OnError, warn
from checkflow.store.trainer.forked import disown_in_children, is_closed
from checkflow.store.trainer.lingering import Lingering
from checkflow.store.trainer.mirror_process import MirrorProcess
from checkflow.store.trainer.peers import Peers
from checkflow.store.trainer.persist_every import Pace, PersistEvery
from checkflow.store.trainer.rulings import Rulings
from checkflow.store.trainer.sender import MirrorTarget
from checkflow.store.trainer.status import Status, Tally
from checkflow.store.trainer.supervisor import Supervisor
from checkflow.store.trainer.waiting import Waiting

RECORD_ROOM_BYTES = 2**20
HUNG_S = 2.0  # for a saver that hung, when it was looked at last, to move
REPORT_S = 1.0  # a saver that was killed before its report never gives it
CLOSE_S = 600.0


class StoreHandle:
    """See the module. Made by `open`; a context manager that closes."""

    def __init__(
        self, shared: SharedMemory, layouts: Sequence[Layout], lock: StoreLock, tally: Tally, *, pace: Pace,
        when_full: WhenFull, on_error: OnError, notify: Callable[[str], None], tell: Callable[[str], None],
        hang_s: float, retry_s: float, peers: Peers | None, replica: bool,
    ) -> None:  # fmt: skip
        self.shared = shared
        self.layouts = tuple(layouts)  # of the slots of each lane
        self._lock = lock
        self._slots = Slots(shared, self.layouts, when_full, grouped=peers is not None, replica=replica)
        self._pace = pace
        self._when_full = when_full
        self._notify = notify
        self._tell = tell
        self._tally = tally
        self._saver = Supervisor(shared, self._slots, lock, tally, hang_s=hang_s, retry_s=retry_s, replica=replica)
        self._news = Delivery(self._saver.news, tally, on_error, notify)
        self.rulings = None if peers is None else Rulings(peers, shared, self._slots, self._saver, pace, tally)
        self._waiting = Waiting(shared, self._slots, self._saver, tally, self.rulings)
        self._closed = False
        # Also of one that nobody has any more.
        self._let_go = weakref.finalize(self, _let_go, self._saver, lock, shared)
        self._let_go.atexit = False
        disown_in_children(self)

    @classmethod
    def open(
        cls,
        path: Path,
        layouts: Sequence[Layout],
        *,
        after: StoreHandle | None = None,
        slots: int = 3,
        when_full: WhenFull = "skip",
        record_room_bytes: int = RECORD_ROOM_BYTES,
        persist_every: PersistEvery = PersistEvery(),  # noqa: B008 (frozen)
        retention: Retention = Retention(),  # noqa: B008 (frozen)
        on_error: OnError = "raise",
        notify: Callable[[str], None] = warn,
        tell: Callable[[str], None] | None = None,
        hang_s: float = 120.0,
        retry_s: float = RETRY_S,
        versions: Mapping[str, str] | None = None,
        peers: Peers | None = None,
        replica: bool = False,
    ) -> StoreHandle:
        """Take the store, allocate the slots, start the saver.

        `layouts`: of a slot; where a checkpoint has lanes, of a slot of each, of which there are `slots`.

        `after`: a handle on the same store, whose slots no longer do. What they hold is durable before they are given
        up, and nobody else gets the store in between.

        `peers`: other ranks that have the other parts of each checkpoint. Which are persisted, and which may be pruned,
        is agreed with them.

        `replica`: a slot of the first kind has a whole checkpoint. One of the second has what makes the next of the
        newest, which another process does; once staged it counts as that one.

        What cannot be made durable is tried again for `retry_s`, and as long by a saver whose trainer died; only then
        is it an error. `notify` is told what a person should see to: the previous saver's last errors, what is tried
        again or works again, and, under on_error="warn", errors; `tell` (`notify` unless given) what is waited for.
        Raises StoreBusyError that names the other trainer, StoreError for memory, store or process, and InputError.
        """
        if not 0 <= retry_s < math.inf:
            raise InputError(f"retry_s: {retry_s} is no number of seconds; use 0 or more")
        try:
            path = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise StoreError(f"store: {path} is no path of a directory ({error.args[-1]}); choose another") from None
        config = SaverConfig(
            path,
            tuple(layout.specs for layout in layouts),
            retention,
            dict(versions or {}),
            newest_wins=when_full == "skip" and peers is None,
            retry_s=retry_s,
            grouped=peers is not None,
            replica=replica,
        ).dump()
        with contextlib.ExitStack() as undo:
            with held_back(sigterm=False):
                tally, pace = (Tally(), Pace(persist_every)) if after is None else (after._tally, after._pace)
                lock = StoreLock.acquire(path, notify, tell=tell) if after is None else after._hand_over()
                undo.callback(lock.close)
                for line in take_log(path, lock.directory_fd):
                    notify(f"{path}: the previous run's saver could not tell: {line}")
                shared = SharedMemory.create(
                    layouts, slots=slots * len(layouts), record_room_bytes=record_room_bytes, config=config
                )
                undo.callback(shared.close)
                handle = cls(
                    shared, layouts, lock, tally, pace=pace, when_full=when_full, on_error=on_error,
                    notify=notify, tell=tell or notify, hang_s=hang_s, retry_s=retry_s, peers=peers, replica=replica,
                )  # fmt: skip
                undo.callback(handle._let_go)
                if after is not None:
                    handle._saver.news.extendleft(reversed(after._saver.news))  # what its saver told when it ended
                if after is not None and after.rulings is not None and after.rulings.target is not None:
                    handle.mirror_at(after.rulings.target)
            undo.pop_all()
        return handle

    def __enter__(self) -> StoreHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """Where the store is now: the directory that was locked may have been moved, and another one be at its path."""
        return self._lock.path

    @property
    def saver_pid(self) -> int | None:
        """The saver process; None once it is given up or ended."""
        return self._saver.pid

    @property
    def replica_lost(self) -> str:
        """Why nothing is made of slots of the second kind any more; "" where it is."""
        return "" if self._saver.replica is None else self._saver.replica.lost

    def acquire(self, lane: int = 0, completed: int | None = None) -> Slot | None:
        """A slot of a lane to fill; None (counted) under `skip` where none is free. `completed`: see Waiting.

        Waits for memory that is still on its way; under `wait` until the saver has persisted one: where it cannot, that
        is raised before its slot is used again, and None if on_error is "warn".
        """
        slot = self.try_acquire(lane)
        if slot is None:
            slot = self._waiting.for_memory(lane)
        if slot is None and self._when_full == "wait":
            slot = self._waiting.for_slot(lane, completed, self.poll)
        if slot is None:
            self._tally.skipped += 1
        elif self._when_full == "wait":
            try:
                self.poll()  # what was in the slot may have been given up since: that is raised, and it is not filled
            except BaseException:
                self.abandon(slot)
                raise
        return slot

    def try_acquire(self, lane: int = 0) -> Slot | None:
        """As `acquire`, but never waits, counts nothing, and may be asked again for the same checkpoint."""
        self._saver.wake()
        return self._slots.try_acquire(lane)

    def take_memory(self) -> None:
        """Wait until every slot has its memory, to be pinned. Raises StoreError (or notifies) where it is refused."""
        self.shared.pinned = True
        while self.shared.pages.wait_for_more():
            pass
        self.poll()

    def stage(self, slot: Slot, iteration: int, record: bytes, *, whole: bool = True) -> None:
        """The slot completes the checkpoint of this many completed iterations; `record` is its commit record, JSON.

        Not `whole`: it will be part of one that a slot of another lane completes.

        From here on it survives the trainer's death. Raises StoreError, and leaves the slot to the caller, where memory
        for the record does not suffice.
        """
        if not whole:
            self._slots.stage(slot, iteration, record, due=False, whole=False)
            if self.rulings is not None:
                self.rulings.part_staged(slot.index, iteration)
            return
        due = self.rulings is None and self._pace.due(iteration, time.monotonic(), self._tally.last_persist_s)
        due = self._slots.stage(slot, iteration, record, due=due)
        self._tally.stage(iteration)
        if due:
            self._saver.tell(WAKE)
        if self.rulings is not None:
            self.rulings.staged(slot.index, iteration)

    def skipped(self, iteration: int) -> None:
        """No slot will have this checkpoint."""
        if self.rulings is not None:
            self.rulings.skipped(iteration)

    def restored(self, checkpoint: Checkpoint) -> None:
        """The next iteration follows this one's. Of a training in several processes each has restored its part."""
        self._pace.restored(checkpoint.iteration)
        if self.rulings is not None and checkpoint.path.parent.resolve() == self.path:  # of as many
            self.rulings.restored(checkpoint.serial)

    def break_off(self) -> None:
        """The next checkpoint takes a slot of each lane, and goes on from none."""
        self._slots.break_off()

    def abandon(self, slot: Slot) -> None:
        """Give back a slot whose filling failed."""
        self._slots.abandon(slot)

    def reclaim(self, but: Collection[int]) -> None:
        """Give back all that are being filled but these, by index: something was interrupted that knew of them."""
        self._slots.reclaim(but)

    def start_mirror(self, host: str) -> MirrorProcess:
        """Of another rank's slots, at this address. Raises StoreError."""
        return MirrorProcess(self._lock, host)

    def mirror_at(self, target: MirrorTarget) -> None:
        """Each checkpoint goes there, too, and counts once it is there."""
        assert self.rulings is not None  # ranks alone have mirrors
        self.rulings.mirror_at(target)

    def start_uploader(self, config: BucketConfig) -> BucketProcess:
        """What is durable goes to a bucket, too. It is of the store, whatever slots follow these. Raises StoreError."""
        return BucketProcess(config, self._lock, self._tally, self._notify, self._tell)

    def persist_now(self, *, keep: bool = False) -> int | None:
        """Have the newest staged checkpoint persisted soon, and retained for good if `keep`; None if no slot has it."""
        sequence = self._slots.newest_sequence
        if sequence is not None and (keep or self.shared.durable_sequence < sequence):
            self._saver.ask_again(sequence)
            self._slots.ask(keep=keep)
            self._saver.hurry()
        return sequence

    def poll(self) -> None:
        """Raise (or notify of) what went wrong in the background since. Never waits."""
        if not self._closed:
            self._saver.tend()
        self._deliver()

    def drain(self, deadline_s: float) -> bool:
        """Wait until the newest staged checkpoint is durable, and kept if that was asked for, and return whether it is.

        Errors go by on_error. Once it is closed there is nothing to wait for: what was not durable was told then.
        """
        if self._closed:
            return True
        done = self._drain(time.monotonic() + deadline_s)
        self._deliver()
        return done

    @property
    def events(self) -> deque[Event]:
        """What happened since, oldest first; for whoever tells it to take from."""
        return self._tally.events

    @property
    def pending(self) -> bool:
        """Whether a staged checkpoint waits to be persisted, or is being."""
        return self._slots.pending

    def status(self) -> Status:
        """Counters, as far as the saver has reported."""
        return self._tally.status()

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Drain, end the saver, release the store. Slots must no longer be used, nor be registered as pinned."""
        if self._closed:
            return
        deadline = time.monotonic() + deadline_s
        with held_back(sigterm=False), contextlib.ExitStack() as last:
            last.callback(self._let_go)  # what is told names the store, whose path its lock knows
            try:
                self._saver.tell(LAST)
                self._drain(deadline)
                self._saver.end(deadline, Lingering(self.path, self._tell))
            finally:
                self._shut()
            self._deliver()

    def _hand_over(self) -> StoreLock:
        """Close, but keep the store's lock. Raises StoreError, and stays open, where what is staged is not durable."""
        deadline = time.monotonic() + CLOSE_S
        durable = self._drain(deadline)
        self._deliver()
        if not durable and self._slots.newest_sequence is not None:
            raise StoreError(f"{self.path}: its slots cannot be given up, for what they hold is not durable")
        self._saver.end(deadline, Lingering(self.path, self._tell))
        self._shut()
        self._let_go.detach()
        self.shared.close()
        return self._lock

    def _shut(self) -> None:
        self._closed = True
        if self.rulings is not None:
            self.rulings.close()
        is_closed(self)

    def _drain(self, deadline: float) -> bool:
        if self.rulings is not None:
            self.rulings.wait(deadline)
        deaths, until_moved = self._saver.deaths, min(deadline, time.monotonic() + HUNG_S)
        sequence = self.persist_now()
        what = f"the checkpoint of iteration {self._slots.staged_iteration}"
        lingering = Lingering(self.path, self._tell)
        while sequence is not None and not self._slots.is_done(sequence):
            if self._saver.is_lost and self._saver.deaths > deaths:  # one more was started, and died, too
                self._saver.fail(f"{what} is lost: no saver runs")
                return False
            if self._saver.hangs and time.monotonic() >= until_moved:
                return False
            if sequence in self._saver.failed and not self.pending:  # not being tried again
                return False
            if time.monotonic() >= deadline:
                self._saver.fail(f"{what} is not durable at the deadline; check the disk, or give a later deadline")
                return False
            if self._slots.newest_sequence != sequence and not self.pending:
                return False  # it was given up
            self._saver.wait(min(0.1, deadline - time.monotonic()))
            self._saver.tend()
            self._news.announce()
            lingering.until(f"{what} is on disk")
        self._saver.tend()
        if sequence is not None:
            self._hear_of(self._slots.staged_iteration, min(deadline, time.monotonic() + REPORT_S))
        return self._slots.newest_is_durable and sequence not in self._saver.failed

    def _hear_of(self, iteration: int | None, deadline: float) -> None:
        """Until the report of a durable checkpoint is there, which a saver gives after it: so that counters have it."""
        while self._tally.durable_iteration != iteration and time.monotonic() < deadline:
            self._saver.wait(min(0.1, deadline - time.monotonic()))
            self._saver.tend()

    def _deliver(self) -> None:
        if self.rulings is not None and (trouble := self.rulings.read_back()) is not None:
            self._notify(f"{self.path}: {trouble}")
        refusal = self.shared.pages.take_refusal()
        if refusal is not None:
            self._saver.fail(refusal)
        self._news.deliver()

    def disown(self) -> None:
        """In a forked child: let go of what would outlive the trainer there."""
        self._closed = True
        self._let_go.detach()
        self._lock.disown()
        self.shared.close()
        self._saver.disown()


def _let_go(saver: Supervisor, lock: StoreLock, shared: SharedMemory) -> None:
    """A saver that still runs persists the newest staged checkpoint, and ends."""
    saver.disown()
    lock.close()
    shared.close()
