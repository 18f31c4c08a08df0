"""One checkpoint on its way: which of its moves are pending, held in a snapshot, or issued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from checkflow.errors import DeviceError
from checkflow.runtime.binding import BoundStorage
from checkflow.runtime.counters import Cause
from checkflow.runtime.device import Batch, Copy, CopyEvent, Device, Snapshot
from checkflow.runtime.sampled import Glance
from checkflow.runtime.sink import NamedSlot
from checkflow.runtime.slot_map import SlotMap
from checkflow.runtime.timetable import ActionKind, Timetable
from checkflow.state.host.updates import Updates
from checkflow.state.names import StateName
from checkflow.torch_internals import versions


class Progress(IntEnum):
    PENDING = 0  # the live tensor is the only copy
    SNAPSHOT = 1  # a snapshot holds the value
    ISSUED = 2  # on its way to the slot, or there


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A gradient, or its factors, on the way to the slot."""

    pieces: tuple[torch.Tensor, ...]  # uint8, end to end
    counted: tuple[torch.Tensor, ...]  # what counts writes of them
    shares: bool = False  # its storage, with other gradients or the next one

    def between(self, start: int, end: int) -> Iterator[torch.Tensor]:
        """The bytes from `start` to `end`."""
        for piece in self.pieces:
            low, high = max(start, 0), min(end, piece.numel())
            if low < high:
                yield piece[low:high]
            start, end = start - piece.numel(), end - piece.numel()


class InFlight:
    """A checkpoint being filled. It is *open* until the iteration that it saves has ended.

    A part of it that is saved as it was some iterations before is closed when that iteration ends. `whole`: no part is,
    whatever the timetable says: all is read as it is at the end, and no gradients.
    """

    def __init__(
        self,
        iteration: int,
        slot: NamedSlot,
        timetable: Timetable,
        slots: SlotMap,
        device: Device,
        *,
        whole: bool = False,
    ) -> None:
        self.binding = slots.binding
        self.iteration = iteration
        self.slot = slot
        self.updates: Updates | None = None if whole or timetable.parts == timetable.lanes == 1 else Updates()
        self._left = 1 if whole else timetable.parts  # iterations that have to end until it is closed
        self.record: Callable[[], bytes] | None = None
        self.last: CopyEvent | None = None  # of everything issued so far
        self.checks: dict[BoundStorage, tuple[int, ...]] = {}  # static state being copied: no write until it is staged
        self.written_unseen = False  # some of it, before a guard waited for the copy
        self.glances: list[Glance] = []  # at gradients that it has, as updates consumed them
        self._timetable = timetable
        self._slots = slots
        self._device = device
        self._progress = [Progress.PENDING] * len(timetable.moves)
        self._pending = len(timetable.moves)
        self._cursor = 0
        self._paused = timetable.pause is None
        self._again: list[int] = []  # moves behind the cursor whose early copies went stale
        self._snapshots: dict[int, tuple[Snapshot, ...]] = {}  # of a move; of factors two, end to end
        self._events: dict[int, CopyEvent] = {}  # of moves that left from a snapshot
        self._early: dict[int, tuple[int, ...]] = {}  # move -> version that it copied while open
        self._held: dict[int, tuple[Leaving, list[int]]] = {}  # move -> its gradient, and the versions consumed
        self._overdue: set[int] = set()  # moves of gradients that are planned to have left, and are not there yet
        self._to_keep: set[int] = set()  # likewise, to be held
        self._to_vacate: set[int] = set()  # in whose place the next ones may be written from now on
        if whole:
            self._leave_out(index for index, move in enumerate(timetable.moves) if move.gradient)

    @property
    def open(self) -> bool:
        """Whether the iteration that it saves has not ended."""
        return self._left > 0

    def _is_open(self, index: int) -> bool:
        """Whether the iteration whose value a move carries has not ended."""
        return self._left > (0 if self.updates is None else self._timetable.moves[index].back)

    @property
    def issued(self) -> bool:
        """Whether everything is on its way."""
        return not self._pending and not self._again and not self.open

    def advance(self, time: int) -> None:
        """Do what is due up to a time. At a pause all of the checkpoint is issued, and what it held goes after it."""
        events, start = self._timetable.events, self._cursor
        while self._cursor < len(events) and events[self._cursor][0] <= time:
            self._cursor += 1
        pause, pauses = self._timetable.pause, False
        if not self._paused and pause is not None:
            pauses = self._paused = pause <= time
        if self._cursor == start and not pauses:
            return
        due = events[start : self._cursor]
        releases = [index for _, kind, index in due if kind is ActionKind.RELEASE]
        self._do(
            snapshots=[index for _, kind, index in due if kind is ActionKind.SNAPSHOT],
            offloads=[index for _, kind, index in due if kind is ActionKind.OFFLOAD],
            releases=() if pauses else releases,
        )
        self._vacate([index for _, kind, index in due if kind is ActionKind.VACATE])
        if pauses:
            if self.last is not None and not self._device.done(self.last):
                self._device.wait(self.last, Cause.PAUSE)
            self._do(snapshots=(), offloads=(), releases=releases)

    def close(self, slots: SlotMap, record: Callable[[], bytes] | None, *, keep_early: bool = False) -> None:
        """The iteration has ended: what was copied before and written since is copied again, unless `keep_early`."""
        self.binding, self._slots, self.record = slots.binding, slots, record
        self._left = 1
        self.part_ended(keep_early=keep_early)

    def part_ended(self, *, keep_early: bool = False) -> None:
        """An iteration has ended, and with it the part of the checkpoint that is saved as it is now.

        A gradient of it that is not there yet will not come: its optimizer made no update, or it had none.
        """
        self._left -= 1
        for index, version in list(self._early.items()):
            if not self._is_open(index):
                storage = self.binding.storages.get(self._timetable.moves[index].storage)
                del self._early[index]
                if not keep_early and (storage is None or storage.version() != version):
                    self._reset(index)
        if self.updates is not None:
            self._leave_out(
                index
                for index, move in enumerate(self._timetable.moves)
                if move.gradient and move.back == self._left and self._progress[index] is Progress.PENDING
            )
        again, self._again = self._again, []
        self._do(snapshots=again, offloads=again, releases=())

    def consume(self, back: int, gradients: Mapping[int, Leaving]) -> bool:
        """An update, `back` iterations before the checkpoint's, is about to consume these, by id.

        They are held until they have left. False where one was consumed before in the same iteration.
        """
        for row, leaving in gradients.items():
            for index in self._timetable.moves_of.get(row, ()):
                move = self._timetable.moves[index]
                if move.back != back:
                    continue
                if self._progress[index] is not Progress.PENDING:
                    return False
                self._snapshots[index] = tuple(
                    self._device.hold(part)
                    for part in leaving.between(move.offset_bytes, move.offset_bytes + move.size_bytes)
                )
                self._held[index] = leaving, versions(leaving.counted)
                self._progress[index] = Progress.SNAPSHOT
        self._keep_apart(self._to_keep & self._held.keys())
        self._to_keep -= self._held.keys()
        overdue = sorted(index for index in self._overdue if index in self._held)
        self._overdue.difference_update(overdue)
        self._do(snapshots=(), offloads=overdue, releases=())
        self._vacate(sorted(self._to_vacate & self._held.keys()))
        return True

    def consumed(self, back: int, row: int) -> bool:
        """Whether all of a gradient is held, or on its way."""
        its = (index for index in self._timetable.moves_of.get(row, ()) if self._timetable.moves[index].back == back)
        return all(self._progress[index] is not Progress.PENDING for index in its)

    def arrives(self, name: StateName, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where a gradient's pieces are in the slot, once they have left."""
        return [copy.destination for copy in self._slots.end_to_end(self.slot, name, 0, pieces)]

    def let_go(self, *, ended: bool = False) -> None:
        """Of gradients that have left. `ended`: all of it has."""
        for index in list(self._held):
            event = self._events.get(index)
            if ended or (event is not None and self._device.done(event)):
                self._release(index)

    def unchanged(self) -> bool:
        """Whether gradients that are on their way are as their updates consumed them."""
        return all(versions(leaving.counted) == counted for leaving, counted in self._held.values())

    def secure(self, storages: Iterable[BoundStorage]) -> None:
        """These are about to be written: nothing of them may be pending afterwards."""
        moves_of, progress = self._timetable.moves_of, self._progress
        due = [
            index
            for storage in storages
            for index in moves_of.get(storage.id, ())
            if progress[index] is Progress.PENDING and not self._is_open(index)
        ]
        if due:
            planned = [index for index in due if self._timetable.moves[index].snapshot]
            direct = [index for index in due if not self._timetable.moves[index].snapshot]
            self._do(snapshots=planned, offloads=direct, releases=())

    def finish(self) -> None:
        """Issue everything that is left, from the live tensors and the snapshots as they are."""
        left = [index for index, progress in enumerate(self._progress) if progress is not Progress.ISSUED]
        self._cursor, self._again = len(self._timetable.events), []
        self._do(snapshots=(), offloads=left, releases=())
        self._do(snapshots=(), offloads=(), releases=tuple(self._snapshots))

    def _do(self, *, snapshots: Iterable[int], offloads: Iterable[int], releases: Iterable[int]) -> None:
        later = []
        for index in releases:
            if self._progress[index] is Progress.ISSUED:
                self._release(index)
            else:
                later.append(index)
        moves = self._timetable.moves
        snapshots = list(snapshots)
        self._take([i for i in snapshots if self._progress[i] is Progress.PENDING and not moves[i].gradient])
        self._keep_apart(i for i in snapshots if moves[i].gradient)
        self._to_keep.update(i for i in snapshots if moves[i].gradient and self._progress[i] is Progress.PENDING)
        left = [index for index in offloads if self._progress[index] is not Progress.ISSUED]
        if self.updates is not None:
            missing = [i for i in left if moves[i].gradient and self._progress[i] is Progress.PENDING]
            self._overdue.update(missing)
            left = [index for index in left if index not in self._overdue]
        for together in self._slots.batches(left):
            self._issue(together)
        for index in later:
            self._release(index)

    def _take(self, indices: list[int]) -> None:
        """Make snapshots. Where memory does not suffice the moves stay pending, and a guard issues them as direct."""
        sources = []
        for index in indices:
            storage = self.binding.storages.get(self._timetable.moves[index].storage)
            if storage is not None:
                sources.append((index, storage, self._slots.source(index)))
        if not sources:
            return
        try:
            made = self._device.snapshot([source for _, _, source in sources])
        except DeviceError:
            self._issue([index for index, _, _ in sources])
            return
        for (index, storage, _), snapshot in zip(sources, made, strict=True):
            self._snapshots[index] = (snapshot,)
            self._progress[index] = Progress.SNAPSHOT
            if self._is_open(index):
                self._early[index] = storage.version()

    def _vacate(self, indices: list[int]) -> None:
        """Training writes the next gradients where these are: those that wait are copied, and the others have left."""
        self._to_vacate.update(indices)  # those that are yet to be consumed
        self._to_vacate -= self._held.keys()
        self._keep_apart(indices)
        held = [index for index in indices if index in self._held and self._held[index][0].shares]
        self._issue([index for index in held if self._progress[index] is Progress.SNAPSHOT])  # no room for a copy
        for index in held:
            if not self._device.done(self._events[index]):
                self._device.wait(self._events[index], Cause.GRADIENT)
            self._release(index)

    def _keep_apart(self, indices: Iterable[int]) -> None:
        """Of gradients that share a storage, which training would let go of, their bytes alone are held from now on."""
        held = [i for i in indices if i in self._held and self._held[i][0].shares]
        for index in held:
            leaving, counted = self._held[index]
            if self._progress[index] is not Progress.SNAPSHOT:
                continue
            try:
                made = self._device.snapshot([snapshot.data for snapshot in self._snapshots[index]])
            except DeviceError:
                return
            self.written_unseen |= versions(leaving.counted) != counted
            self._snapshots[index], self._held[index] = tuple(made), (Leaving((), ()), [])

    def _issue(self, indices: list[int]) -> None:
        if not indices:
            return
        direct = tuple(index for index in indices if index not in self._snapshots)
        batch, read = self._slots.of_moves(self.slot, direct)
        if len(direct) < len(indices):
            batch = Batch((*batch, *(copy for index in indices for copy in self._from_snapshot(index))))
        for index in direct:
            if self._is_open(index):
                storage = self.binding.storages.get(self._timetable.moves[index].storage)
                self._early[index] = () if storage is None else storage.version()
        self.last = self._device.offload(batch)
        for storage in read:
            storage.reading = self.last
        for index in indices:
            self._pending -= 1
            self._progress[index] = Progress.ISSUED
            if index in self._snapshots:
                self._events[index] = self.last

    def _from_snapshot(self, index: int) -> Iterable[Copy]:
        """A move's copies, from the snapshot of its bytes; none where there is no snapshot."""
        snapshots = self._snapshots.get(index, ())
        if index in self._held:
            yield from self._slots.of_gradient(self.slot, index, [snapshot.data for snapshot in snapshots])
            return
        for copy in self._slots.of_move(self.slot, index) if snapshots else ():
            start = int(copy.source.storage_offset()) - self._timetable.moves[index].offset_bytes
            yield Copy(copy.destination, snapshots[0].data[start : start + copy.source.numel()])

    def _release(self, index: int) -> None:
        leaving, counted = self._held.pop(index, (None, []))
        self.written_unseen |= leaving is not None and versions(leaving.counted) != counted
        snapshots, event = self._snapshots.pop(index, ()), self._events.pop(index, None)
        if event is not None:
            for snapshot in snapshots:
                self._device.release(snapshot, event)

    def _leave_out(self, indices: Iterable[int]) -> None:
        """Moves whose bytes no restore will look at."""
        for index in list(indices):
            self._progress[index] = Progress.ISSUED
            self._pending -= 1
            self._overdue.discard(index)

    def _reset(self, index: int) -> None:
        if self._progress[index] is Progress.ISSUED:
            self._pending += 1
            self._release(index)
        self._snapshots.pop(index, None)
        self._early.pop(index, None)
        self._progress[index] = Progress.PENDING
        self._again.append(index)
