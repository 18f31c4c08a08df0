"""Follows a schedule: at each anchor what is planned up to it, at each guard whatever is still missing.

No decision here depends on a predicted time. A checkpoint is staged only when every byte of it was read before its
tensor's next write; where hooks fire at other moments than planned, or not at all, training waits longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from checkflow.errors import InputError
from checkflow.runtime.audit import Audit
from checkflow.runtime.binding import Binding, Storage, bind, check_updated
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Device, Event
from checkflow.runtime.flight import Flight, SlotMap
from checkflow.runtime.guards import CAUSES, Guard, GuardKind, changes
from checkflow.runtime.program import program_of
from checkflow.runtime.sink import Policy, Sink, Slot
from checkflow.runtime.spots import Spots
from checkflow.schedule import Schedule
from checkflow.training import Training


class Executor:
    """Runs in the training's threads; every method may be called from a hook.

    Args:
        schedule: what to follow.
        training: the live models and optimizers; `iteration` is not called.
        binding: of both, as `bind` made it.
        device: copies.
        sink: takes whole checkpoints.
        capture: the host's state as it is now, called when an iteration ends.
        interval: iterations from one checkpoint to the next.
        policy: what to do when no slot is free.
        disarmed: kinds of guards that do nothing. For tests: it tears checkpoints.
        audit: compare samples of the state for writes that no guard saw.
    """

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        binding: Binding,
        device: Device,
        sink: Sink,
        capture: Callable[[], bytes],
        counters: Counters,
        *,
        interval: int,
        policy: Policy,
        disarmed: frozenset[GuardKind] = frozenset(),
        audit: bool = False,
    ) -> None:
        self.program = program_of(schedule)
        self.spots = Spots(self.program)
        self.completed = 0  # iterations
        self.started = self.staged = self.skipped = self.discarded = 0  # checkpoints
        self.static_bytes = 0
        self.last_staged = -1  # iteration
        self.touched = False  # something ran since the last iteration ended
        self.opaque = False  # code without hooks may run: compiled, or captured as a CUDA graph
        self._schedule = schedule
        self._training = training
        self._device = device
        self._sink = sink
        self._capture = capture
        self._counters = counters
        self._interval = interval
        self._policy = policy
        self._disarmed = disarmed
        self._audit = Audit() if audit else None
        self._lock = threading.RLock()
        self._depth = 0
        self._broken = False
        self._stopped = False
        self._on_leaving: Callable[[], None] | None = None
        self._binding = binding
        self._slots = SlotMap(self.program, binding)
        self._guards: list[Guard] = []
        self._updated: set[int] = set()  # optimizers that made an update
        self._flights: deque[Flight] = deque()  # closed, oldest first
        self._open: Flight | None = None  # of the iteration that is running
        self._tried_to_open = False
        self._spare: Slot | None = None
        self._statics: dict[tuple[int, str], tuple[int, ...]] = {}  # (slot, storage) -> version that the slot holds
        self._progress = 0  # anchor of the running iteration

    # Called by hooks

    def reach(self, kind: str, subject: str) -> None:
        """An anchor fires."""
        if self._stopped or self._captured():
            return
        self.touched = True
        number = self.spots.fire(kind, subject)
        if number is not None and number > self._progress:
            with self._entered():
                self._advance(number)

    def guard(self, guard: Guard) -> None:
        """What this guard covers is about to be written."""
        guard.fired = guard.ever = True
        if self._stopped or self._captured():
            return
        self.touched = True
        if self._audit is not None:
            self._audit.check(guard.storages)
        if guard.kind in self._disarmed:
            return
        with self._entered():
            for storage in guard.storages:
                if changes(storage, guard.kind):
                    storage.epoch += 1
            self._protect(guard.storages, CAUSES[guard.kind])

    def updated(self, number: int) -> None:
        """Optimizer `number` has made an update."""
        if not self._binding.absent or self._stopped:
            return
        stale = self._binding.stale(self._training)
        if stale:
            self.rebind()
        if stale or number not in self._updated:
            self._updated.add(number)
            check_updated(self._binding, self._training, number)

    def loaded(self) -> None:
        """An optimizer's state was replaced."""
        if not self._stopped:
            self.rebind()

    def watch(self, guards: Iterable[Guard]) -> None:
        """Guards that fire from now on."""
        self._guards += guards
        for guard in self._guards:
            guard.bind(self._binding)

    def rebind(self) -> None:
        """Find the tensors anew. Raises InputError where they no longer are what the schedule has."""
        with self._entered():
            self._binding = bind(self._schedule, self._training, self._binding)
            self._slots = SlotMap(self.program, self._binding)
            for guard in self._guards:
                guard.bind(self._binding)

    def opaque_code(self) -> None:
        """Code is being compiled that may write state without a hook: nothing may be pending when it runs."""
        if not self._stopped:
            with self._entered():
                self.opaque = True
                self._protect(self._binding.storages.values(), Cause.UNWATCHED)

    # Called by the user, between iterations

    def step(self) -> None:
        """An iteration ended: its state is the next checkpoint's, if one is due."""
        with self._entered():
            self._device.check()
            self._sink.poll()
            self._advance(self.program.anchor_count)
            self.completed += 1
            if self.completed % self._interval == 0:
                self._begin(self._policy)
            self.spots.end()
            for guard in self._guards:
                guard.fired = False
            self._progress, self._tried_to_open, self.touched = 0, False, False
            self._device.collect()
            self._stage_finished()

    def resume(self, completed: int) -> None:
        """The state was restored as it was after so many iterations."""
        with self._entered():
            self._drop_open()
            self.completed = self.last_staged = completed
            self.rebind()

    def save(self) -> None:
        """Stage a checkpoint of the last completed iteration. Raises InputError where its state is gone already."""
        with self._entered():
            if self.last_staged != self.completed and all(f.iteration != self.completed for f in self._flights):
                if self.touched:
                    raise InputError("save: the next iteration has begun; call it right after step()")
                self._drop_open()
                self._begin("block")
            self.drain()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Complete and stage all checkpoints of completed iterations; False where the time did not suffice."""
        with self._entered():
            started = time.perf_counter_ns()
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for flight in self._flights:
                flight.finish()
            in_time = True
            for flight in self._flights:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if flight.last is not None:
                    in_time = in_time and self._device.synchronize(flight.last, left)
            self._stage_finished()
            self._counters.stalled(Cause.DRAIN, time.perf_counter_ns() - started)
            return in_time

    def close(self) -> None:
        """Complete what can be completed; hooks do nothing from now on."""
        if self._stopped:
            return
        try:
            if not self._broken:
                self.drain()
        finally:
            self._stopped = True
            self._drop_open()
            self._flights.clear()
            self._device.collect()
            self._device.close()

    def when_safe(self, action: Callable[[], None]) -> None:
        """Run an action now, or when the work in progress ends. For signal handlers."""
        if self._depth:
            self._on_leaving = action
        else:
            action()

    @property
    def unwatched(self) -> tuple[str, ...]:
        """State that no trusted guard covers now."""
        return tuple(storage.name for storage in self._unwatched())

    # Inside

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            started = time.perf_counter_ns()
            self._depth += 1
            try:
                yield
            except BaseException:
                self._broken = True  # interrupted in the middle: what is in flight cannot be vouched for
                raise
            finally:
                self._depth -= 1
                if not self._depth:
                    self._counters.issue_ns += time.perf_counter_ns() - started
        if not self._depth and self._on_leaving is not None:
            action, self._on_leaving = self._on_leaving, None
            action()

    def _captured(self) -> bool:
        if not self._device.capturing():
            return False
        self.opaque = True
        unfinished = [f for f in self._flights if f.last is None or not f.issued]
        for flight in unfinished:  # replays will write without hooks
            self._discard(flight)
            self._flights.remove(flight)
        self._drop_open()
        return True

    def _advance(self, number: int) -> None:
        self._progress = number
        running, program = self.completed + 1, self.program
        for flight in self._flights:
            flight.advance(program.time(running - flight.iteration, number))
        if program.first <= program.time(0, number) and running % self._interval == 0:
            self._advance_open(running, program.time(0, number))
        self._stage_finished()

    def _advance_open(self, running: int, now: int) -> None:
        """Copies that are due before the iteration's end. Without a free slot they are made at its end."""
        if self._open is None and not self._tried_to_open and self._progress < self.program.anchor_count:
            self._tried_to_open = True
            slot = self._free_slot()
            if slot is not None:
                self._open = Flight(running, slot, self.program, self._slots, self._device)
        if self._open is not None:
            self._open.advance(now)

    def _begin(self, policy: Policy) -> None:
        if self._binding.stale(self._training):
            self.rebind()
        flight, self._open = self._open, None
        if flight is None:
            slot = self._free_slot()
            if slot is None and policy == "block":
                slot = self._blocked()
            if slot is None:
                self.skipped += 1
                return
            flight = Flight(self.completed, slot, self.program, self._slots, self._device)
        record = self._capture()
        flight.close(self._slots, record, keep_early=GuardKind.REWRITE in self._disarmed)
        self._flights.append(flight)
        self.started += 1
        self._copy_hosted(flight)
        self._copy_statics(flight)
        flight.advance(self.program.time(0, self.program.anchor_count))
        unwatched = self._unwatched()
        if unwatched and GuardKind.UNWATCHED not in self._disarmed:
            self._protect(unwatched, Cause.UNWATCHED)
        if self._audit is not None:
            self._audit.sample(self._binding.storages.values(), frozenset(unwatched))

    def _copy_hosted(self, flight: Flight) -> None:
        for storage in self._binding.hosted:
            for copy in self._slots.of_storage(flight.slot, storage):
                copy.destination.copy_(copy.source)

    def _copy_statics(self, flight: Flight) -> None:
        """State that the schedule does not move: into each slot once, and again when it changed."""
        changed: list[Storage] = []
        for storage in self._binding.storages.values():
            if storage.written:
                continue
            version = storage.version()
            if self._statics.get((flight.slot.index, storage.name)) != version:
                changed.append(storage)
                flight.checks[storage] = version
                self._statics[flight.slot.index, storage.name] = version
        if not changed:
            return
        self.static_bytes += sum(storage.data.numel() for storage in changed)
        event = self._device.offload([c for s in changed for c in self._slots.of_storage(flight.slot, s)])
        flight.also(event)
        for storage in changed:
            storage.reading = event

    def _unwatched(self) -> list[Storage]:
        trusted = {storage for guard in self._guards if guard.trusted(opaque=self.opaque) for storage in guard.storages}
        return [s for s in self._binding.storages.values() if s.written and s not in trusted]

    def _protect(self, storages: Iterable[Storage], cause: Cause) -> None:
        storages = tuple(storages)
        for flight in self._flights:
            flight.secure(storages)
        latest: Event | None = None
        for storage in storages:
            if storage.reading is not None and (latest is None or storage.reading.order > latest.order):
                latest = storage.reading
        if latest is not None and not self._device.done(latest):
            self._device.wait(latest, cause)
        for storage in storages:
            storage.reading = None
            for flight in self._flights:
                flight.checks.pop(storage, None)

    def _free_slot(self) -> Slot | None:
        slot, self._spare = self._spare, None
        return slot if slot is not None else self._sink.acquire("skip")

    def _blocked(self) -> Slot | None:
        """Wait for a slot. What is in flight has to be staged first: the sink frees only older ones."""
        self.drain()
        started = time.perf_counter_ns()
        slot = self._sink.acquire("block")
        self._counters.stalled(Cause.SLOT, time.perf_counter_ns() - started)
        return slot

    def _stage_finished(self) -> None:
        while self._flights:
            flight = self._flights[0]
            if not flight.issued or (flight.last is not None and not self._device.done(flight.last)):
                return
            self._flights.popleft()
            assert flight.record is not None
            if any(storage.version() != version for storage, version in flight.checks.items()):
                self._discard(flight)
                continue
            self._sink.stage(flight.slot, flight.iteration, flight.record)
            self.staged, self.last_staged = self.staged + 1, flight.iteration

    def _discard(self, flight: Flight) -> None:
        self.discarded += 1
        self._keep_slot(flight.slot)

    def _drop_open(self) -> None:
        if self._open is not None:
            self._keep_slot(self._open.slot)
            self._open = None

    def _keep_slot(self, slot: Slot) -> None:
        if self._spare is None:
            self._spare = slot
        else:
            self._sink.abandon(slot)
