"""The checkpoints in flight, oldest first, and the slots that they share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from checkflow.errors import CheckflowError
from checkflow.events import Skipped
from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import CopyEvent, Device
from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.sink import NamedSlot, Sink
from checkflow.runtime.slot_map import SlotMap
from checkflow.runtime.timetable import Timetable
from checkflow.runtime.unmoved import Unmoved
from checkflow.state.host.updates import with_fields
from checkflow.state.names import StateName
from checkflow.text import said

Record = Callable[[], bytes]  # the host's part of a checkpoint, made when the copies have ended


class Pipeline:
    """Opens, fills and stages checkpoints. The caller says when an anchor is reached and when state is written."""

    def __init__(
        self,
        timetables: tuple[Timetable, ...],
        binding: Binding,
        device: Device,
        sink: Sink,
        capture: Callable[[int], Record],
        counters: Counters,
        *,
        keep_early: bool,
        late: Callable[[], Mapping[StateName, torch.Tensor]] = dict,
        note: Callable[[Skipped], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.started = self.staged = self.skipped = self.discarded = 0
        self.static_bytes = 0
        self.last_staged = -1  # iteration
        self.problems: list[Exception] = []  # each cost a checkpoint and nothing else; to be raised between iterations
        self.vouched_by: list[Callable[[], None]] = []  # asked before anything is staged; may call `doubt`
        self.timetable = timetables[0]  # what all have in common
        self.lanes = len(timetables)  # kinds of slots
        self.replica = self.timetable.replica  # they are: the whole state; what brings it an iteration on
        self.beside: Callable[[int], str] = lambda _: ""  # what a checkpoint in lanes adds to its record
        self.base = -1  # iteration of the last checkpoint that was read at once, as far as those since go on from it
        self.chain: dict[int, InFlight] = {}  # by lane, of the newest checkpoint
        self.parts_allowed = True  # a checkpoint may be filled in several iterations, where it is planned so
        self._device = device
        self._sink = sink
        self._capture = capture
        self.counters = counters
        self._keep_early = keep_early  # for tests: it tears checkpoints
        self._note = note  # of checkpoints that there are not
        self._binding = binding
        self._timetables = timetables
        self._slots = self._maps()
        self._closed: deque[InFlight] = deque()  # oldest first
        self._open: InFlight | None = None  # of the iteration that is running
        self._tried_to_open = -1  # iteration
        self._spares: dict[int, NamedSlot] = {}  # by lane
        self._unmoved = Unmoved(device, counters, late, tell)

    def rebind(self, binding: Binding) -> None:
        """Checkpoints that are closed keep the tensors that they began with. One that is only in parts is given up."""
        if self.parted is not None:
            self.drop_open()
        self._binding = binding
        self._slots = self._maps()

    def _maps(self) -> tuple[SlotMap, ...]:
        return tuple(SlotMap(each, self._binding, lane) for lane, each in enumerate(self._timetables))

    def lane(self, iteration: int) -> int:
        """Of which lane the slot is that an iteration fills."""
        return self.lanes - 1 if self.replica else iteration % self.lanes

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being filled."""
        return self._open is not None or bool(self._closed)

    @property
    def parted(self) -> InFlight | None:
        """The checkpoint that is open, if parts of it leave in several iterations."""
        return self._open if self._open is not None and self._open.updates is not None else None

    @property
    def newest(self) -> InFlight | None:
        """The checkpoint that was closed last."""
        return self._closed[-1] if self._closed else None

    @property
    def waiting(self) -> Sequence[InFlight]:
        """Closed checkpoints that are not staged yet, the oldest first."""
        return self._closed

    def advance(self, running: int, anchor: int, *, due: int | None) -> None:
        """Iteration `running` has reached an anchor. `due`: the iteration whose checkpoint it is, or is a part of."""
        for checkpoint in self._closed:
            checkpoint.advance(self.timetable.time(running - checkpoint.iteration, anchor))
            checkpoint.let_go()
        now = self.timetable.time(0 if due is None else running - due, anchor)
        if due is not None and (self.lanes > 1 or self.timetable.first <= now):
            if self._may_open(running, anchor, due):
                self.open(due)
            if self._open is not None:
                self._open.advance(now)
                self._open.let_go()
        self.stage_finished()

    def open(self, iteration: int, *, wait: bool = False) -> None:
        """Begin to fill an iteration's checkpoint before it ends, unless that was tried; `wait` as of `begin`."""
        if self._open is None and self._tried_to_open != iteration:
            self._tried_to_open = iteration
            lane = self.lane(iteration)
            if (slot := self._free_slot(lane)) is None:  # without one the copies are made when the iteration ends
                slot = self._demanded_slot(lane, iteration - 1, wait=True) if wait else self._freed_meanwhile(lane)
            if slot is not None:
                self._open = InFlight(iteration, slot, self._timetables[lane], self._slots[lane], self._device)
            if not (self.goes_on(iteration) if self.lanes > 1 else self.parts_allowed or self.timetable.parts == 1):
                self.drop_open()  # others were staged for its slot, and that has found why not

    def _may_open(self, running: int, anchor: int, due: int) -> bool:
        """Before the iteration's end; of several, in the first one, and while all state is where it is planned."""
        if self.lanes > 1:
            return anchor < self.timetable.anchor_count and self.goes_on(running)
        if self.timetable.parts == 1:
            return anchor < self.timetable.anchor_count
        return self.parts_allowed and not self._misplaced and due - running == self.timetable.parts - 1

    def goes_on(self, iteration: int) -> bool:
        """Whether, of lanes, an iteration's slot may complete a checkpoint with those before it."""
        linked = self.base >= 0 and self.chain[self.lane(iteration - 1)].iteration == iteration - 1
        return linked and self.parts_allowed and not self._misplaced

    @property
    def _misplaced(self) -> bool:
        return self._binding.is_misplaced or any(slots.lacking for slots in self._slots)

    def begin(self, iteration: int, *, wait: bool) -> bool:
        """The state now is that of a checkpoint. False where no slot is free; `wait` makes one free if possible.

        False, too, where `capture` cannot read the host's state: that is the training's own code, costs one
        checkpoint, and is raised when the iteration's end is complete.
        """
        if self._open is not None and self.lanes > 1 and not self.goes_on(iteration):
            self.drop_open()
        filled = [] if self._open is None else [self._open]
        self._open = None
        if not filled:
            filled = self._whole(iteration, wait=wait)
            if not filled:
                self.skipped += 1
                self._passes_over(iteration, "no slot was free")
                return False
        try:
            record = self._capture(iteration)
        except BaseException as error:
            for checkpoint in filled:
                self._keep(checkpoint.slot)
            if not isinstance(error, Exception):
                raise
            self.problems.append(error)
            self._passes_over(iteration, "the host's state could not be read")
            return False
        last = filled[-1]
        if self.lanes > 1:
            self.base = iteration if last.updates is None else self.base
            if self.replica:
                self.chain.update(dict.fromkeys(range(self.lanes) if last.updates is None else (self.lanes - 1,), last))
            else:
                self.chain.update({self.lane(iteration + 1 + at - len(filled)): each for at, each in enumerate(filled)})
            fields = self.beside(iteration)
            state, record = record, lambda: with_fields(state(), fields)
        elif (updates := last.updates) is not None:
            state, record = record, lambda: with_fields(state(), updates.field(iteration))
        self.started += 1
        self._unmoved.look(self._binding)
        for checkpoint in filled:
            slots = self._slots[checkpoint.slot.index % self.lanes]
            checkpoint.close(slots, record if checkpoint is last else None, keep_early=self._keep_early)
            self._closed.append(checkpoint)
            self.static_bytes += self._unmoved.copy(checkpoint, slots, self._binding)
        self._unmoved.copy_loose([(each, self._slots[each.slot.index % self.lanes]) for each in filled], self._binding)
        for checkpoint in filled:
            checkpoint.advance(self.timetable.time(0, self.timetable.anchor_count))
        return True

    def _whole(self, iteration: int, *, wait: bool) -> list[InFlight]:
        """To be read as it is now: of lanes a slot of each, the one that the next iteration fills first; or none."""
        filled: list[InFlight] = []
        self._sink.break_off()
        all_lanes = (self.lane(at) for at in range(iteration + 1, iteration + 1 + self.lanes))
        for lane in (0,) if self.replica else all_lanes:
            slot = self._free_slot(lane) or self._demanded_slot(lane, iteration, wait=wait)
            if slot is None:
                for checkpoint in filled:
                    self._keep(checkpoint.slot)
                return []
            if self.replica:
                self._unmoved.forget_slot(slot.index)
            timetable, slots = self._timetables[lane], self._slots[lane]
            filled.append(InFlight(iteration, slot, timetable, slots, self._device, whole=True))
        return filled

    def protect(self, storages: Iterable[BoundStorage], cause: Cause) -> None:
        """These are about to be written: what is still to be read of them is read first."""
        storages = tuple(storages)
        latest: CopyEvent | None = None
        for checkpoint in self._closed:
            checkpoint.secure(storages)
        if (parted := self.parted) is not None:
            parted.secure(storages)
        for storage in storages:
            if storage.reading is not None and (latest is None or storage.reading.order > latest.order):
                latest = storage.reading
        if latest is not None and not self._device.done(latest):
            self._device.wait(latest, cause)
        for storage in storages:
            storage.reading = None
            for checkpoint in self._closed:
                checkpoint.written_unseen |= checkpoint.checks.pop(storage, storage.version()) != storage.version()

    def doubt(self) -> None:
        """Something in flight may have been read too late: none of it is staged."""
        self.drop_open()
        self.base = -1
        for checkpoint in self._closed:
            checkpoint.written_unseen = True

    def stage_finished(self) -> None:
        """Hand over what is complete. Never blocks."""
        while self._closed:
            checkpoint = self._closed[0]
            if not checkpoint.issued or (checkpoint.last is not None and not self._device.done(checkpoint.last)):
                return
            for vouch in self.vouched_by:
                vouch()
            self._closed.popleft()
            checkpoint.let_go(ended=True)
            if checkpoint.written_unseen or any(s.version() != version for s, version in checkpoint.checks.items()):
                self._discard(checkpoint)
                continue
            try:
                record = b"{}" if checkpoint.record is None else checkpoint.record()
            except Exception as error:  # noqa: BLE001 (it is made by a user's objects)
                self._failed(checkpoint, error)
                continue
            try:  # what a signal's handler raises in here is no failure of it, as Ctrl-C is none
                self._sink.stage(checkpoint.slot, checkpoint.iteration, record, whole=checkpoint.record is not None)
            except CheckflowError as error:
                self._failed(checkpoint, error)
                continue
            if checkpoint.record is not None:
                self.staged, self.last_staged = self.staged + 1, checkpoint.iteration

    def _failed(self, checkpoint: InFlight, error: Exception) -> None:
        """It cannot be staged; the slot is still ours."""
        self.problems.append(error)
        self._discard(checkpoint, said(error) or type(error).__name__)

    def drain(self, timeout_s: float | None = None, cause: Cause = Cause.DRAIN) -> bool:
        """Complete and stage everything in flight; False where the time did not suffice."""
        if not self._closed:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for checkpoint in self._closed:
            checkpoint.finish()
        in_time = True
        with self._device.stalling(cause):
            for checkpoint in self._closed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if checkpoint.last is not None:
                    in_time = in_time and self._device.synchronize(checkpoint.last, left)
            self.stage_finished()
        return in_time

    def _freed_meanwhile(self, lane: int) -> NamedSlot | None:
        """A slot that is free once a device that is behind its host has come by, while that has more to do."""
        oldest = None
        while True:
            self.stage_finished()
            slot, before = self._free_slot(lane), oldest
            oldest = self._closed[0] if self._closed else None
            if slot is not None or oldest is None or oldest is before or oldest.last is None:
                return slot
            if not (oldest.issued and self._device.done_meanwhile(oldest.last)):
                return None

    def complete(self) -> None:
        """Wait until all bytes of what has begun are in their slots."""
        for checkpoint in self._closed:
            checkpoint.finish()
            if checkpoint.last is not None:
                self._device.synchronize(checkpoint.last)

    def has(self, iteration: int) -> bool:
        """Whether this iteration's checkpoint is staged, as the newest, or in flight."""
        return self.last_staged == iteration or any(checkpoint.iteration == iteration for checkpoint in self._closed)

    def drop_open(self) -> None:
        """The running iteration will not be saved as it began."""
        if self._open is not None:
            self._keep(self._open.slot)
            self._open = None
            if self.lanes > 1:
                self.base = -1

    def drop_unissued(self) -> None:
        """What was not read yet may be written without a guard: give it up."""
        self.drop_open()
        for checkpoint in [checkpoint for checkpoint in self._closed if not checkpoint.issued]:
            self._closed.remove(checkpoint)
            self._discard(checkpoint)

    def discard_all(self) -> None:
        """Nothing in flight can be vouched for, nor what slots are said to hold."""
        self.drop_open()
        while self._closed:
            self._discard(self._closed.popleft())
        self._sink.reclaim([slot.index for slot in self._spares.values()])
        self._unmoved.forget()
        self._tried_to_open = self.base = -1

    def forget(self) -> None:
        """The state was replaced: what was staged is of another past. Nothing may be in flight."""
        assert not self.busy
        self.last_staged = self._tried_to_open = self.base = -1
        self._unmoved.forget()

    def succeed(self, before: Pipeline) -> None:
        """Count on from what another one did."""
        self.started, self.staged, self.skipped = before.started, before.staged, before.skipped
        self.discarded, self.static_bytes, self.last_staged = before.discarded, before.static_bytes, before.last_staged
        self.problems += before.problems

    def drop_all(self) -> None:
        """Hold on to no slot and no tensor."""
        self.drop_open()
        while self._spares:
            self._sink.abandon(self._spares.popitem()[1])
        for checkpoint in self._closed:
            self._passes_over(checkpoint.iteration, "it was in flight when the training was let go")
        self.discarded += len(self._closed)
        self._closed.clear()
        self.chain.clear()
        self.base = -1
        self._slots = self._maps()

    def _free_slot(self, lane: int) -> NamedSlot | None:
        return self._spares.pop(lane, None) or self._sink.try_acquire(lane)

    def _demanded_slot(self, lane: int, completed: int, *, wait: bool) -> NamedSlot | None:
        """What is in flight has to be staged before anything is waited for: the sink frees only what is older."""
        if wait:
            self.drain(cause=Cause.SLOT)
            slot = self._free_slot(lane)  # one that was given up may be free now
        else:
            slot = self._freed_meanwhile(lane)
        if slot is not None:
            return slot
        try:
            with self._device.stalling(Cause.SLOT):  # its memory may still be on its way
                slot = self._sink.acquire(lane, completed)
        except CheckflowError as error:  # of an earlier checkpoint, maybe: this one goes without a slot
            self.problems.append(error)
        return slot

    def _passes_over(self, iteration: int, why: str) -> None:
        self._note(Skipped(iteration, why))
        self._sink.pass_over(iteration)

    def _discard(self, checkpoint: InFlight, reason: str = "its bytes cannot be vouched for") -> None:
        self._keep(checkpoint.slot)
        if self.lanes > 1:
            self._give_up_after(checkpoint)
        if checkpoint.record is not None:
            self.discarded += 1
            self._passes_over(checkpoint.iteration, reason)

    def _give_up_after(self, checkpoint: InFlight) -> None:
        """What was to complete a checkpoint with it never will; what was read at once since stands by itself."""
        for later in self._closed:
            if later.updates is None and later.iteration != checkpoint.iteration:
                return
            later.written_unseen = True
        self.base = -1

    def _keep(self, slot: NamedSlot) -> None:
        if self._spares.setdefault(slot.index % self.lanes, slot) is not slot:
            self._sink.abandon(slot)
