"""The device without an accelerator: one thread copies, in order, and the training thread is the compute stream."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from checkflow.errors import DeviceError
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, CopyEvent, Snapshot
from checkflow.torch_internals import foreach_copy

_NOTHING = 2**63
_STOPPED = "copies to host memory stopped"


@dataclass(frozen=True, slots=True)
class HostEvent:
    """The end of the order-th offload."""

    order: int


class HostDevice:
    """Large copies are memmoves, small ones go together in one call; both run without the interpreter's lock."""

    few_bytes = 256 * 1024  # to copy so little takes less than to run a hook and wake up the thread for it
    inline_bytes = few_bytes  # so little is copied at once if the thread is idle
    is_host = True

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._jobs: SimpleQueue[tuple[int, Batch] | None] = SimpleQueue()
        self._given = 0
        self._ended = 0
        self._wanted = _NOTHING  # order that somebody waits for
        self._ends = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkflow-copies", daemon=True)
        self._thread.start()

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to prepare."""

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        try:
            made = [Snapshot(source.clone()) for source in sources]
        except RuntimeError as error:
            raise DeviceError(f"snapshot: no memory ({str(error).splitlines()[0]})") from None
        self._counters.snapshot_bytes += sum(source.numel() for source in sources)
        return made

    def hold(self, source: torch.Tensor) -> Snapshot:
        return Snapshot(source)

    def offload(self, batch: Batch) -> HostEvent:
        self.check()
        order = self._given = self._given + 1  # interrupted here, it is a number that no copy has; the next are higher
        if self._ended == order - 1 and batch.size_bytes <= self.inline_bytes:
            try:
                self._serve(order, batch)
            except RuntimeError as error:  # torch's; what else is raised here, a signal's handler has raised
                raise DeviceError(f"{_STOPPED}: {error}") from error
        else:
            self._jobs.put((order, batch))
        return HostEvent(order)

    def wait(self, event: CopyEvent, cause: Cause) -> None:
        started = time.perf_counter_ns()
        self._await(event.order, None)
        self._counters.stalled(cause, time.perf_counter_ns() - started)

    def done(self, event: CopyEvent) -> bool:
        return self._ended >= event.order

    def done_meanwhile(self, event: CopyEvent) -> bool:
        return self.done(event)  # the compute stream is the host itself

    def synchronize(self, event: CopyEvent, timeout_s: float | None = None) -> bool:
        return self._await(event.order, timeout_s)

    def stalling(self, cause: Cause) -> AbstractContextManager[None]:
        return self._counters.stalling(cause)

    def release(self, _snapshot: Snapshot, event: CopyEvent) -> None:
        """The caller drops the last reference; the copy has to be over by then."""
        if not self.done(event):
            self.wait(event, Cause.RELEASE)

    def capturing(self) -> bool:
        return False

    def check(self) -> None:
        if self._error is not None:
            raise DeviceError(f"{_STOPPED}: {self._error}") from self._error

    def collect(self) -> None:
        """Always up to date."""

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _await(self, order: int, timeout_s: float | None) -> bool:
        with self._ends:
            self._wanted = order  # seen by the thread before it looks, or its end is seen here
            ended = self._ends.wait_for(lambda: self._ended >= order or self._error is not None, timeout_s)
            self._wanted = _NOTHING
        self.check()
        return ended

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed and self._error is None:
            try:
                self._serve(*job)
            except BaseException as error:  # noqa: BLE001, raised again by the next call in the training thread
                self._error = error
            job = None  # drops the references to live state and to snapshots
            if self._ended >= self._wanted or self._error is not None:
                with self._ends:
                    self._ends.notify_all()

    def _serve(self, order: int, batch: Batch) -> None:
        started = time.perf_counter_ns()
        self._copy(batch)
        self._counters.link_busy_ns += time.perf_counter_ns() - started
        self._counters.offloaded_bytes += batch.size_bytes
        self._ended = order

    def _copy(self, batch: Batch, /) -> None:
        if batch.small:  # too small for torch to split over the threads that training needs
            foreach_copy(*batch.small.lists, non_blocking=False)
        for copy in batch.large:  # addresses are asked now: share_memory_() moves a storage
            ctypes.memmove(copy.destination.data_ptr(), copy.source.data_ptr(), copy.source.numel())
