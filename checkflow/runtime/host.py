"""The device without an accelerator: one thread copies, in order, and the training thread is the compute stream."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checkflow.errors import DeviceError
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Copy, Event, Snapshot


@dataclass(frozen=True, slots=True)
class HostEvent:
    """The end of the order-th offload."""

    order: int


class HostDevice:
    """Copies with memmove, which runs without the interpreter's lock."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._jobs: deque[Sequence[Copy]] = deque()
        self._changed = threading.Condition()
        self._given = 0
        self._ended = 0
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

    def offload(self, copies: Sequence[Copy]) -> HostEvent:
        with self._changed:
            self._raise_error()
            self._jobs.append(copies)
            self._given += 1
            self._changed.notify_all()
            return HostEvent(self._given)

    def wait(self, event: Event, cause: Cause) -> None:
        started = time.perf_counter_ns()
        self._await(event.order, None)
        self._counters.stalled(cause, time.perf_counter_ns() - started)

    def done(self, event: Event) -> bool:
        return self._ended >= event.order

    def synchronize(self, event: Event, timeout_s: float | None = None) -> bool:
        return self._await(event.order, timeout_s)

    def release(self, _snapshot: Snapshot, event: Event) -> None:
        """The caller drops the last reference; the copy has to be over by then."""
        if not self.done(event):
            self.wait(event, Cause.RELEASE)

    def capturing(self) -> bool:
        return False

    def check(self) -> None:
        with self._changed:
            self._raise_error()

    def collect(self) -> None:
        """Always up to date."""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join()

    def _await(self, order: int, timeout_s: float | None) -> bool:
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended >= order or self._error is not None, timeout_s)
            self._raise_error()
            return ended

    def _raise_error(self) -> None:
        if self._error is not None:
            raise DeviceError(f"copies to host memory stopped: {self._error}") from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                copies = self._jobs.popleft()
            started = time.perf_counter_ns()
            try:
                self._copy_all(copies)
            except BaseException as error:  # noqa: BLE001, raised again in the training thread
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            self._counters.link_busy_ns += time.perf_counter_ns() - started
            self._counters.offloaded_bytes += sum(copy.source.numel() for copy in copies)
            copies = ()  # drops the references to live state and to snapshots
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _copy_all(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._copy(copy)

    def _copy(self, copy: Copy, /) -> None:
        ctypes.memmove(copy.destination.data_ptr(), copy.source.data_ptr(), copy.source.numel())
