"""What the user holds while a training is attached."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from checkflow.checkpointing.sink import StoreSink
from checkflow.collector import paused_collector
from checkflow.errors import CheckflowError, InputError, StoreError
from checkflow.hoststate.capture import HostState
from checkflow.hoststate.objects import HostObjects
from checkflow.restore import check_restorable, restore
from checkflow.runtime.binding import Binding
from checkflow.runtime.counters import Counters
from checkflow.runtime.cuda import CudaDevice
from checkflow.runtime.device import Device
from checkflow.runtime.executor import Executor
from checkflow.runtime.hook import place
from checkflow.runtime.host import HostDevice
from checkflow.runtime.pipeline import Record
from checkflow.runtime.stats import Meter, Stats
from checkflow.runtime.terminate import OnTerminate
from checkflow.schedule import Schedule
from checkflow.store.handle import StoreHandle
from checkflow.store.reader import load_newest
from checkflow.store.status import Status
from checkflow.training import Training

DURABLE_DEADLINE_S = 600.0
_LOG = logging.getLogger("checkflow")


class Checkpointer:
    """An attached training; made by `attach`, closed by `with`."""

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        objects: HostObjects,
        host: HostState,
        binding: Binding,
        handle: StoreHandle,
        store: Path,
        *,
        interval: int,
        block: bool,
        sigterm_deadline_s: float | None,
        audit: bool,
        notify: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._training = training
        self._objects = objects
        self._handle = handle
        self._store = store
        self._notify = notify
        self._deadline_s = sigterm_deadline_s
        self._counters = Counters()
        self._meter = Meter(self._counters)
        self._closed = False
        self._restorable: object = None  # the structure of host state that was found to match the files
        self._metadata: Mapping[str, object] = {}
        device: Device
        if binding.device.type == "cuda":
            handle.take_memory()  # to be pinned
            device = CudaDevice(self._counters, binding.device)
        else:
            device = HostDevice(self._counters)
        try:
            device.register(handle.address, handle.shared.size_bytes)
        except BaseException:
            device.close()
            raise

        def capture(iteration: int) -> Record:
            captured = host.capture(iteration)
            if host.structure == self._restorable:
                return captured.record
            self._restorable = host.structure
            return lambda: self._checked(captured.record())

        self._executor = Executor(
            schedule,
            training,
            binding,
            device,
            StoreSink(handle),
            capture,
            self._counters,
            interval=interval,
            block=block,
            audit=audit,
            late=host.tensors,
            tell=notify,
        )
        self._hooks = place(self._executor, training)
        self._on_terminate = (
            None if sigterm_deadline_s is None else OnTerminate(self._terminate, self._executor.when_safe)
        )

    def restore(self, iteration: int | None = None) -> int:
        """Bring everything back to the newest checkpoint that verifies, or to that of an iteration.

        Returns how many iterations are completed: 0 for an empty store. Tells of checkpoints that were skipped and of
        what could not be restored. Raises CorruptStoreError where none verifies, InputError where it is of another
        training.
        """
        with paused_collector(), self._handle.shared.pages.paused():  # both take memory, and this one is waited for
            found = load_newest(self._handle.path, iteration)
            for skipped in found.skipped:
                self._notify(f"{self._store}: skipped {skipped}")
            if found.loaded is None:
                return 0
            restored = restore(found.loaded.files, found.loaded.record, self._training, self._objects)
        for name in restored.missing:
            self._notify(f"{self._store}: {name} is not in this checkpoint; it stays as it is")
        self._metadata = restored.metadata
        self._executor.resume(restored.iteration)
        return restored.iteration

    @property
    def metadata(self) -> Mapping[str, object]:
        """The user's own JSON in the checkpoint that was restored; empty where none was."""
        return self._metadata

    def step(self) -> None:
        """An iteration ended, its update included. Raises what went wrong in the background, within a second of it."""
        self._executor.step()
        self._meter.step()

    def save(self, *, keep: bool = True) -> None:
        """Checkpoint the iteration that just ended, or was restored, and return when it is durable.

        `keep`: retain it for good.

        Raises InputError where the next iteration has begun already and this one was not saved.
        """
        if not self._executor.save():  # every slot is full: one is free once the newest staged one is durable
            self._handle.drain(DURABLE_DEADLINE_S)
            if not self._executor.save():
                raise StoreError(f"{self._store}: save: no slot is free; see what the saver reported, or use slots=3")
        if self._handle.persist_now(keep=keep) is None and keep:
            raise StoreError(f"{self._store}: save: the next checkpoint has the only slot; call it right after step()")
        self._handle.drain(DURABLE_DEADLINE_S)

    def stats(self) -> Stats:
        """What checkpointing did and cost so far."""
        return self._meter.stats(self._executor, self._schedule)

    def status(self) -> Status:
        """How far the checkpoints are: staged, durable, verified."""
        return self._handle.status()

    def close(self) -> None:
        """Make the last completed iteration durable, due or not, and let the training go.

        Where the next iteration has begun, its host state has moved on: the last checkpoint that was due is the newest.
        """
        self._close(complete=True)

    def _close(self, *, complete: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if self._on_terminate is not None:
            self._on_terminate.remove()
        try:
            if complete and self._executor.unsaved:
                with self._told(StoreError):  # no slot is free: the handle's own error says why, by the user's policy
                    self.save(keep=False)
        finally:
            for hook in self._hooks:
                hook.remove()
            try:
                self._executor.close()
            finally:
                self._handle.close(DURABLE_DEADLINE_S)
        _LOG.info("%s: %s", self._store, self.stats())

    def _checked(self, record: bytes) -> bytes:
        """The first record of its kind. Raises InputError where no restore would take it."""
        try:
            check_restorable(self._handle.layout, record, self._training, self._objects)
        except CheckflowError as error:
            raise InputError(f"{self._store}: no restore would take this training's checkpoints: {error}") from None
        return record

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._close(complete=True)
        else:  # it is the one to raise; and the loader may be ahead of the last iteration
            with self._told(CheckflowError):
                self._close(complete=False)

    @contextmanager
    def _told(self, kind: type[CheckflowError]) -> Iterator[None]:
        """What goes wrong inside is told, not raised."""
        try:
            yield
        except kind as problem:
            self._notify(f"{self._store}: {problem}")

    def _terminate(self) -> None:
        assert self._deadline_s is not None
        deadline = time.monotonic() + self._deadline_s
        try:
            staged = self._executor.drain(self._deadline_s)
            self._handle.persist_now()
            durable = self._handle.drain(max(0.0, deadline - time.monotonic()))
        except CheckflowError as problem:
            self._notify(f"{self._store}: SIGTERM: {problem}")
            return
        if not (staged and durable):
            self._notify(f"{self._store}: SIGTERM: the last iteration is not durable after {self._deadline_s:g} s")
