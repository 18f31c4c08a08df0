"""The checkpoints in flight, oldest first, and the slots and static state they share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from checkflow.errors import CheckflowError
from checkflow.events import Skipped
from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, CopyEvent, Device
from checkflow.runtime.in_flight import InFlight, SlotMap
from checkflow.runtime.sink import NamedSlot, Sink
from checkflow.runtime.timetable import Timetable
from checkflow.state.names import StateName
from checkflow.torch_internals import foreach_copy

Record = Callable[[], bytes]  # the host's part of a checkpoint, made when the copies have ended


class Pipeline:
    """Opens, fills and stages checkpoints. The caller says when an anchor is reached and when state is written."""

    def __init__(
        self,
        timetable: Timetable,
        binding: Binding,
        device: Device,
        sink: Sink,
        capture: Callable[[int], Record],
        counters: Counters,
        *,
        keep_early: bool,
        late: Callable[[], Mapping[StateName, torch.Tensor]] = dict,
        note: Callable[[Skipped], None] = lambda _: None,
    ) -> None:
        self.started = self.staged = self.skipped = self.discarded = 0
        self.static_bytes = 0
        self.last_staged = -1  # iteration
        self.problems: list[Exception] = []  # each cost a checkpoint and nothing else; to be raised between iterations
        self.vouched_by: list[Callable[[], None]] = []  # asked before anything is staged; may call `doubt`
        self.timetable = timetable
        self.parts_allowed = True  # a checkpoint may be filled in several iterations, where it is planned so
        self._device = device
        self._sink = sink
        self._capture = capture
        self._counters = counters
        self._keep_early = keep_early  # for tests: it tears checkpoints
        self._late = late  # tensors of the checkpoint whose host state was just captured
        self._note = note  # of checkpoints that there are not
        self._binding = binding
        self._slots = SlotMap(timetable, binding)
        self._closed: deque[InFlight] = deque()  # oldest first
        self._open: InFlight | None = None  # of the iteration that is running
        self._tried_to_open = -1  # iteration
        self._spare: NamedSlot | None = None
        self._statics: dict[tuple[int, str], tuple[int, ...]] = {}  # (slot, storage) -> version that the slot holds

    def rebind(self, binding: Binding) -> None:
        """Checkpoints that are closed keep the tensors that they began with. One that is only in parts is given up."""
        if self.parted is not None:
            self.drop_open()
        self._binding, self._slots = binding, SlotMap(self.timetable, binding)

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
    def waiting(self) -> bool:
        """Whether a closed checkpoint is not staged yet."""
        return bool(self._closed)

    def advance(self, running: int, anchor: int, *, due: int | None) -> None:
        """Iteration `running` has reached an anchor. `due`: the iteration whose checkpoint it is, or is a part of."""
        for checkpoint in self._closed:
            checkpoint.advance(self.timetable.time(running - checkpoint.iteration, anchor))
        now = self.timetable.time(0 if due is None else running - due, anchor)
        if due is not None and self.timetable.first <= now:
            if self._open is None and self._tried_to_open != due and self._may_open(running, anchor, due):
                self._tried_to_open = due
                slot = self._free_slot()  # without one the copies are made when the iteration ends
                if slot is not None:
                    self._open = InFlight(due, slot, self.timetable, self._slots, self._device)
            if self._open is not None:
                self._open.advance(now)
        self.stage_finished()

    def _may_open(self, running: int, anchor: int, due: int) -> bool:
        """Before the iteration's end; of several, in the first one, and while all state is where it is planned."""
        if self.timetable.parts == 1:
            return anchor < self.timetable.anchor_count
        misplaced = self._binding.loose or self._binding.hosted or self._binding.absent
        return self.parts_allowed and not misplaced and due - running == self.timetable.parts - 1

    def begin(self, iteration: int, *, wait: bool) -> bool:
        """The state now is that of a checkpoint. False where no slot is free; `wait` makes one free if possible.

        False, too, where `capture` cannot read the host's state: that is the training's own code, costs one
        checkpoint, and is raised when the iteration's end is complete.
        """
        checkpoint, self._open = self._open, None
        if checkpoint is None:
            slot = self._free_slot() or self._demanded_slot(wait=wait)
            if slot is None:
                self.skipped += 1
                self._note(Skipped(iteration, "no slot was free"))
                return False
            checkpoint = InFlight(iteration, slot, self.timetable, self._slots, self._device, whole=True)
        try:
            record = self._capture(iteration)
        except BaseException as error:
            self._keep(checkpoint.slot)
            if not isinstance(error, Exception):
                raise
            self.problems.append(error)
            self._note(Skipped(iteration, "the host's state could not be read"))
            return False
        if (updates := checkpoint.updates) is not None:
            state, record = record, lambda: updates.added_to(state())
        checkpoint.close(self._slots, record, keep_early=self._keep_early)
        self._closed.append(checkpoint)
        self.started += 1
        if hosted := self._slots.hosted(checkpoint.slot):
            foreach_copy(*hosted.lists, non_blocking=False)
        self._copy_loose(checkpoint)
        self._copy_statics(checkpoint)
        checkpoint.advance(self.timetable.time(0, self.timetable.anchor_count))
        return True

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
            assert checkpoint.record is not None
            if checkpoint.written_unseen or any(s.version() != version for s, version in checkpoint.checks.items()):
                self._discard(checkpoint)
                continue
            try:
                self._sink.stage(checkpoint.slot, checkpoint.iteration, checkpoint.record())
            except Exception as error:  # noqa: BLE001 (the record is made by a user's objects)
                self.problems.append(error)
                self._discard(checkpoint, str(error) or type(error).__name__)  # the slot is still ours
                continue
            self.staged, self.last_staged = self.staged + 1, checkpoint.iteration

    def drain(self, timeout_s: float | None = None) -> bool:
        """Complete and stage everything in flight; False where the time did not suffice."""
        if not self._closed:
            return True
        started = time.perf_counter_ns()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for checkpoint in self._closed:
            checkpoint.finish()
        in_time = True
        for checkpoint in self._closed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if checkpoint.last is not None:
                in_time = in_time and self._device.synchronize(checkpoint.last, left)
        self.stage_finished()
        self._counters.stalled(Cause.DRAIN, time.perf_counter_ns() - started)
        return in_time

    def complete(self, checkpoint: InFlight) -> None:
        """Wait until all of its bytes are in its slot."""
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
        self._statics.clear()
        self._tried_to_open = -1

    def forget(self) -> None:
        """The state was replaced: what was staged is of another past. Nothing may be in flight."""
        assert not self.busy
        self.last_staged = self._tried_to_open = -1
        self._statics.clear()

    def succeed(self, before: Pipeline) -> None:
        """Count on from what another one did."""
        self.started, self.staged, self.skipped = before.started, before.staged, before.skipped
        self.discarded, self.static_bytes, self.last_staged = before.discarded, before.static_bytes, before.last_staged
        self.problems += before.problems

    def drop_all(self) -> None:
        """Hold on to no slot and no tensor."""
        self.drop_open()
        if self._spare is not None:
            self._sink.abandon(self._spare)
            self._spare = None
        for checkpoint in self._closed:
            self._note(Skipped(checkpoint.iteration, "it was in flight when the training was let go"))
        self.discarded += len(self._closed)
        self._closed.clear()
        self._slots = SlotMap(self.timetable, self._binding)

    def _copy_loose(self, checkpoint: InFlight) -> None:
        """State that is not where the plan has it. What was copied early to its place has been waited for:

        by the rebinding that found it gone, or to release its snapshot.
        """
        late = self._late()
        if not self._binding.loose and not late:
            return
        started = time.perf_counter_ns()
        self._slots.copy_loose(checkpoint.slot)
        for name, tensor in late.items():
            self._slots.copy_now(checkpoint.slot, name, tensor)
        for live in self._binding.loose:
            self._statics.pop((checkpoint.slot.index, live.name), None)
        self._counters.stalled(Cause.UNWATCHED, time.perf_counter_ns() - started)

    def _copy_statics(self, checkpoint: InFlight) -> None:
        """State that the schedule does not move: into each slot once, and again when it changed."""
        changed: list[BoundStorage] = []
        for storage in self._binding.storages.values():
            if not storage.written:
                key, version = (checkpoint.slot.index, storage.name), storage.version()
                if self._statics.get(key) != version:
                    changed.append(storage)
                    checkpoint.checks[storage] = version
                    self._statics[key] = version
        if changed:
            self.static_bytes += sum(storage.data.numel() for storage in changed)
            event = self._device.offload(Batch(c for s in changed for c in self._slots.of_storage(checkpoint.slot, s)))
            checkpoint.last = event
            for storage in changed:
                storage.reading = event

    def _free_slot(self) -> NamedSlot | None:
        slot, self._spare = self._spare, None
        return slot if slot is not None else self._sink.try_acquire()

    def _demanded_slot(self, *, wait: bool) -> NamedSlot | None:
        """What is in flight has to be staged before anything is waited for: the sink frees only what is older."""
        if wait:
            self.drain()
        else:
            self.stage_finished()
        started = time.perf_counter_ns()
        slot = self._free_slot()  # one that was given up may be free now
        if slot is None:
            try:
                slot = self._sink.acquire()
            except CheckflowError as error:  # of an earlier checkpoint, maybe: this one goes without a slot
                self.problems.append(error)
        if wait or slot is not None:  # whose memory was still on its way
            self._counters.stalled(Cause.SLOT, time.perf_counter_ns() - started)
        return slot

    def _discard(self, checkpoint: InFlight, reason: str = "its bytes cannot be vouched for") -> None:
        self.discarded += 1
        self._note(Skipped(checkpoint.iteration, reason))
        self._keep(checkpoint.slot)

    def _keep(self, slot: NamedSlot) -> None:
        if self._spare is None:
            self._spare = slot
        else:
            self._sink.abandon(slot)
