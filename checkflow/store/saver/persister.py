"""One staged checkpoint all the way: written and durable, then settled: verified, and the old ones pruned."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkflow.errors import CorruptStoreError, StoreError, internal, reason
from checkflow.store.both.config import SaverConfig
from checkflow.store.both.leftovers import leftovers, remove_leftovers
from checkflow.store.both.messages import DurableReport, FailedReport, Message, Notice, VerifiedReport
from checkflow.store.both.retry import Patience
from checkflow.store.format.disk import Disk, remove_tree
from checkflow.store.format.layout import Layout
from checkflow.store.format.manifest import Manifest, directory_name
from checkflow.store.format.ranks import note_whole, noted_whole
from checkflow.store.format.reader import Checkpoint, checkpoint_names, examine, verify, verify_written
from checkflow.store.format.retention import Retained, counted, to_prune
from checkflow.store.format.writer import (
    PRUNED,
    Published,
    StagedCheckpoint,
    StagedSlot,
    newest_created,
    next_serial,
    write_checkpoint,
)
from checkflow.store.memory.saver_slots import Taken, give_back, give_up, put_off
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.saver.trouble import advice, resources_are_the_machines

EARLIER_S = 5.0  # how long to go on reading what earlier savers wrote, each time: there may be many, and large ones
_GONE = "do not remove a store that is in use; what was durable in it is gone, too"


@dataclass(frozen=True, slots=True)
class Written:
    """A durable checkpoint that is to be settled."""

    taken: Taken
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its directory's."""
        return directory_name(self.manifest.serial, self.manifest.iteration)

    @property
    def retained(self) -> Retained:
        return Retained(self.manifest.serial, self.manifest.iteration, self.manifest.keep)


@dataclass(slots=True)
class Persister:
    """Persists slots to a store and reports what became of each. Settling may run beside the next one's writing.

    `store`: the path by which this process reaches it; config.store is for messages. `look`: before each change,
    whether the store is still held; raises OSError.
    """

    shared: SharedMemory
    config: SaverConfig
    disk: Disk
    report: Callable[[Message], None]
    store: Path
    look: Callable[[], None] = lambda: None
    patience: Patience = field(init=False)  # with what cannot be written
    layouts: tuple[Layout, ...] = field(init=False)  # of the slots of each lane
    _pruning_fails: bool = field(init=False, default=False)
    _known: dict[str, Retained] = field(
        init=False, default_factory=dict
    )  # checkpoints whose manifest was sound, by directory name
    _unread: dict[str, Checkpoint] = field(init=False, default_factory=dict)  # of these, what earlier savers wrote
    _serial: int = field(init=False, default=0)  # tried last
    _must_look: bool = field(init=False, default=True)  # in the store, for the highest serial
    _arrivals: int = field(init=False, default=0)  # after which it looked
    _created: str = field(init=False, default="")  # when the newest was
    _newest: Published | None = field(init=False, default=None)  # None also where one did not read back
    _serials: dict[int, int] = field(init=False, default_factory=dict)  # by sequence number, where ranks have to agree
    _agreed_serial: int = field(init=False, default=0)  # verified on each rank; nothing newer is pruned
    _noted_serial: int | None = field(init=False, default=None)  # which the store names, too

    def __post_init__(self) -> None:
        self.layouts = tuple(map(Layout.of, self.config.lanes[:1] if self.config.replica else self.config.lanes))
        self.patience = Patience(self.config.retry_s)

    def write(self, taken: Taken, settled: Callable[[], bool] = lambda: False) -> Written | None:
        """Make a taken checkpoint durable and give its slot back; None where that failed, and is to be tried again
        unless patience is exhausted.

        `settled` waits until nothing is being settled, and tells whether anything was settled since this began: what
        was pruned may have made room.
        Errors are reported, not raised.
        """
        started = time.monotonic_ns()
        if taken.record is None:
            self._give_up(
                taken, "a staged checkpoint's record in memory is not what was staged; its slot was overwritten"
            )
            return None
        try:
            published = self._write(self._staged(taken, taken.record), settled)
        except OSError as error:
            self._put_off(taken, error)
            return None
        except Exception as error:  # noqa: BLE001 (one saver after the other would die of it, and nobody hear why)
            self.patience.fails()
            self._give_up(taken, f"{_undurable(taken)} ({internal(error)})")
            return None
        if self.config.grouped:
            self._serials[taken.sequence] = published.manifest.serial
        give_back(self.shared, taken)
        lasted_s = self.patience.succeeds()
        if lasted_s is not None:
            self._tell(f"checkpoints are made durable again, after {lasted_s:.0f} s")
        self.report(
            DurableReport(
                sequence=taken.sequence,
                iteration=taken.iteration,
                serial=published.manifest.serial,
                size_bytes=published.manifest.size_bytes,
                written_bytes=published.written_bytes,
                write_ns=time.monotonic_ns() - started,
            )
        )
        return Written(taken, published.manifest)

    def _staged(self, taken: Taken, record: bytes) -> StagedCheckpoint:
        slots = sorted(taken.slots, key=lambda slot: slot % len(self.layouts))
        staged = tuple(
            StagedSlot(self.shared.slot_bytes(slot), layout, self.shared.word(slot).sequence)
            for slot, layout in zip(slots, self.layouts, strict=True)
        )
        return StagedCheckpoint(staged, taken.iteration, record, taken.keep)

    def agree(self, sequence: int) -> None:
        """Every rank has verified its part of this checkpoint; told of one that another saver wrote, none is newer."""
        self.agree_on(self._serials.get(sequence, 0))
        for older in [each for each in self._serials if each < sequence]:
            del self._serials[older]

    def agree_on(self, serial: int) -> None:
        """The same, of one that may be another saver's."""
        self._agreed_serial = max(self._agreed_serial, serial)
        if self._noted_serial is None:
            self._noted_serial = noted_whole(self.store)
        before = self._noted_serial
        if before is None or self._agreed_serial > before:
            with contextlib.suppress(OSError):  # the next time
                note_whole(self.store, self._agreed_serial)
                if before is None:
                    self.disk.sync_directory(self.store)
                self._noted_serial = self._agreed_serial

    def _put_off(self, taken: Taken, error: OSError) -> None:
        begins = self.patience.fails()
        self.patience.exhausted |= self._is_removed() or error.errno == errno.EOVERFLOW  # no serial is left
        what = f"{_undurable(taken)} ({reason(error)})"
        self.shared.advance()  # a disk that refuses does not hang
        if self.patience.exhausted:
            self._give_up(taken, f"{what}; {_GONE if self._is_removed() else advice(error)}")
            return
        put_off(self.shared, taken, newest_wins=self.config.newest_wins)
        if begins:
            self._tell(f"{what}, and is tried again for {self.config.retry_s:g} s; {advice(error)}")

    def _give_up(self, taken: Taken, why: str) -> None:
        """Told first, so that a trainer that is given its slot can know that the checkpoint in it was lost."""
        self._fail(taken, why)
        give_up(self.shared, taken)

    def _is_removed(self) -> bool:
        """A directory that was removed takes nothing ever again."""
        try:
            return self.store.stat().st_nlink == 0
        except OSError:
            return False

    def settle(self, group: Sequence[Written], *, to_cache: bool = False) -> None:
        """Read back those of a group of durable checkpoints that will be retained, then prune.

        `group`: oldest first. `to_cache`: leave them in the page cache. Errors are reported, not raised.
        """
        try:
            self._settle(group, to_cache=to_cache)
        except Exception as error:  # noqa: BLE001 (as above)
            what = f"checkpoint {group[-1].name} is durable, but was not read back, or no old one removed"
            self._fail(group[-1].taken, f"{what} ({internal(error)})")

    def _settle(self, group: Sequence[Written], *, to_cache: bool) -> None:
        for written in group:
            self._known[written.name] = written.retained
        newest: Written | None = None
        verified: deque[VerifiedReport] = deque()
        unread: list[str] = []
        for written in reversed(group):  # where one does not read back, an older one is retained in its place
            if newest is not None and written.name in self._needless(newest):
                continue
            try:
                verify_ns = self._read_back(written, to_cache=to_cache)
            except CorruptStoreError as error:
                self._newest = None  # the next ones have all their bytes from memory again
                self._fail(written.taken, self._why_unread(written, error))
            except OSError as error:  # nothing is known against it, and nothing is removed for it
                self._tell(f"checkpoint {written.name} cannot be read back ({reason(error)}); {advice(error)}")
                unread.append(written.name)
            else:
                newest = newest or written
                taken = written.taken
                verified.appendleft(
                    VerifiedReport(
                        sequence=taken.sequence,
                        iteration=taken.iteration,
                        serial=written.retained.serial,
                        verify_ns=verify_ns,
                        pruned=0,
                    )
                )
                continue
            self._known[written.name] = dataclasses.replace(written.retained, sound=False)
        if newest is not None:
            last = verified.pop()
            for message in verified:
                self.report(message)
            self.report(last.model_copy(update={"pruned": self._prune_or_tell(newest)}))
        for name in unread:  # the next time they are looked at as a predecessor's are
            self._known.pop(name, None)

    def _why_unread(self, written: Written, error: CorruptStoreError) -> str:
        if not (self.store / written.name).exists():
            why = "remove nothing of a store that is in use"
            return f"checkpoint {written.name} was removed before it was read back; {why}"
        return f"checkpoint {written.name} does not read back as it was written ({error}); check the disk"

    def _read_back(self, written: Written, *, to_cache: bool) -> int:
        """How long it took, in nanoseconds. Raises CorruptStoreError, OSError."""
        started = time.monotonic_ns()
        checkpoint = Checkpoint(self.store / written.name, written.manifest)
        with resources_are_the_machines():
            verify_written(checkpoint, self.shared.advance, to_cache=to_cache)
        return time.monotonic_ns() - started

    def _write(self, staged: StagedCheckpoint, settled: Callable[[], bool]) -> Published:
        """Where the disk is full, once more after what was being settled made room."""
        again = True
        while True:
            try:
                with resources_are_the_machines():
                    self.look()
                    self._serial = self._next_serial()
                    published = write_checkpoint(
                        self.disk, self.store, self._serial, staged, self.config.versions, self.shared.advance,
                        self._newest, self._created,
                    )  # fmt: skip
                self._must_look = False
                self._newest, self._created = published, published.manifest.created
                return published
            except Exception as error:
                self._must_look = True  # it is not known what the store has
                made_room = settled()
                with contextlib.suppress(OSError):  # the error itself is reported; the next saver tries again
                    self.remove_leftovers()
                is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not (again and made_room and is_full):
                    raise
                again = False

    def _next_serial(self) -> int:
        """Counted: to list what waits to be settled takes as long as a small write. What a restore brought has one."""
        listed, arrivals = 0, self.shared.arrivals
        if self._must_look or arrivals != self._arrivals:
            listed = next_serial(self.store)
            self._created = max(self._created, newest_created(self.store))
            self._arrivals = arrivals
        return max([listed, 1 + self._serial, *(1 + known.serial for known in tuple(self._known.values()))])

    def _needless(self, verified: Written) -> tuple[str, ...]:
        """The names of the checkpoints that retention does not hold once this one verified, oldest first.

        Of several ranks' only those that are older than one that each of them has verified.
        """
        return self._named(to_prune(self._known.values(), self._counts_up_to(verified), self.config.retention))

    def _counts_up_to(self, verified: Written) -> int:
        serial = verified.manifest.serial
        return min(serial, self._agreed_serial) if self.config.grouped else serial

    def _named(self, serials: Sequence[int]) -> tuple[str, ...]:
        names = {known.serial: name for name, known in self._known.items()}
        return tuple(names[serial] for serial in serials)

    def _prune_or_tell(self, verified: Written) -> int:
        """Those that cannot be removed are tried again with the next; told when that begins: it fills the disk."""
        try:
            pruned = self._prune(verified)
        except (OSError, StoreError) as error:
            if not self._pruning_fails:
                why = f"{reason(error)}); {advice(error)}" if isinstance(error, OSError) else f"{error})"
                self._tell(f"old checkpoints cannot be removed ({why}")
            self._pruning_fails = True
            return 0
        self._pruning_fails = False
        return pruned

    def _prune(self, verified: Written) -> int:
        store = self.store
        self.look()
        names = checkpoint_names(store)
        for name in self._known.keys() - set(names):
            del self._known[name]
            self._unread.pop(name, None)
        for name in names:  # one that cannot be read is left alone, and looked at again: it may have been the moment
            with contextlib.suppress(OSError):
                if name not in self._known and isinstance(found := examine(store, name), Checkpoint):
                    self._known[name] = Retained(found.serial, found.iteration, found.kept)
                    self._unread[name] = found
        self._read_earlier(verified)
        hidden = leftovers(store, (PRUNED,)) if self._pruning_fails else []
        failed: OSError | None = None
        before = len(hidden)
        for name in self._needless(verified):
            try:
                self.disk.rename(store / name, store / (PRUNED + name))  # so that a half-removed one is no checkpoint
                hidden.append(store / (PRUNED + name))
            except OSError as error:
                failed = failed or error  # the others may still make room
        if hidden:
            self.disk.sync_directory(store)
        for path in hidden:
            try:
                remove_tree(self.disk, path)
            except OSError as error:
                failed = failed or error
            self.shared.advance()
        if failed is not None:
            raise failed
        return len(hidden) - before

    def _read_earlier(self, verified: Written) -> None:
        """Before anything goes: of what earlier savers wrote that which counts in its place, newest first.

        At least until one verifies, and no longer than a moment then. Raises OSError where one cannot be read now.
        """
        until = time.monotonic() + EARLIER_S
        while self._needless(verified):
            counts = counted(self._known.values(), self._counts_up_to(verified), self.config.retention)
            name = next((name for name in self._named(counts) if name in self._unread), None)
            if name is None:
                return
            try:
                with resources_are_the_machines():
                    verify(self._unread[name], self.shared.advance)
            except CorruptStoreError as error:
                self._known[name] = dataclasses.replace(self._known[name], sound=False)
                self._tell(
                    f"checkpoint {name} does not verify ({error}), and an older one is retained in its place; "
                    "once training has ended `checkflow check --repair` removes it"
                )
                del self._unread[name]
            else:
                del self._unread[name]
                if time.monotonic() >= until:
                    return

    def remove_leftovers(self) -> None:
        """Remove what a killed or failed saver left half-written or half-removed. Raises OSError."""
        remove_leftovers(self.disk, self.store)

    def _fail(self, taken: Taken, message: str) -> None:
        self.report(FailedReport(sequence=taken.sequence, message=f"{self.config.store}: {message}"))

    def _tell(self, message: str) -> None:
        self.report(Notice(message=f"{self.config.store}: {message}"))


def _undurable(taken: Taken) -> str:
    return f"the checkpoint of iteration {taken.iteration} cannot be made durable"
