"""A CUDA device: snapshots on the compute stream, offloads on a stream of their own, pinned slots.

The compute stream is whichever is current where a hook runs; autograd sets it in its own thread too. Nothing here keeps
what an offload reads: live tensors are the binding's, and before a snapshot is dropped the stream that allocated it
waits, so its memory returns at once and is not written before it was read. The allocator needs no record_stream.

Each call here takes the training's time on the host, so an offload is one copy of many tensors, and streams are found
by the device's number: PyTorch looks a torch.device up anew, for tens of microseconds.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from checkflow.errors import DeviceError
from checkflow.runtime import cudart
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, CopyEvent, Snapshot
from checkflow.torch_internals import foreach_copy
from checkflow.units import format_bytes

_LOOK_S = 0.0001


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """The end of the order-th offload, and its start; both carry times."""

    order: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Stall:
    cause: Cause
    before: torch.cuda.Event
    after: torch.cuda.Event


class CudaDevice:
    """Raises DeviceError where CUDA refuses; a failed copy shows at the next call, as CUDA reports it."""

    few_bytes = 256 * 1024  # some 5 us of a link; to give it one more copy takes longer
    is_host = False

    def __init__(self, counters: Counters, device: torch.device) -> None:
        self._counters = counters
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._offloads: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._given = 0
        self._running: deque[CudaEvent] = deque()
        self._stalls: deque[_Stall] = deque()
        self._registered: list[int] = []

    def register(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._device):
            code = cudart.register_host(address, size_bytes)
        if code != 0:
            raise DeviceError(
                f"slots: CUDA refuses to pin {format_bytes(size_bytes)} of host memory (cudaHostRegister: {code}); "
                "raise the limit of locked memory (ulimit -l) or of the container, or use fewer slots"
            )
        self._registered.append(address)

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        stream = torch.cuda.current_stream(self._device)
        try:
            made = [Snapshot(torch.empty_like(source), stream) for source in sources]
        except torch.cuda.OutOfMemoryError:
            size = format_bytes(sum(source.numel() for source in sources))
            raise DeviceError(f"snapshot: no device memory for {size}") from None
        foreach_copy([snapshot.data for snapshot in made], list(sources), non_blocking=True)
        self._counters.snapshot_bytes += sum(source.numel() for source in sources)
        return made

    def hold(self, source: torch.Tensor) -> Snapshot:
        return Snapshot(source, torch.cuda.current_stream(self._device))

    def offload(self, batch: Batch) -> CudaEvent:
        self._forget_ended()
        start, end = _timed_event(), _timed_event()
        copy = self._copies(batch)  # first: what the host does between the events would count as the link's time
        self._behind.record(torch.cuda.current_stream(self._device))
        self._offloads.wait_event(self._behind)
        start.record(self._offloads)
        if batch:
            copy()
        end.record(self._offloads)
        self._given += 1
        event = CudaEvent(self._given, start, end, batch.size_bytes)
        self._running.append(event)
        return event

    def _copies(self, batch: Batch) -> Callable[[], None]:
        """What gives the offload stream a batch."""
        if not cudart.has_batches():
            return partial(self._copy_one_by_one, batch)
        destinations, sizes_bytes = batch.places
        sources = array("Q", [copy.source.data_ptr() for copy in batch])
        return partial(self._copy, destinations, sources, sizes_bytes)

    def _copy_one_by_one(self, batch: Batch) -> None:
        with torch.cuda.stream(self._offloads):
            foreach_copy(*batch.lists, non_blocking=True)

    def _copy(self, destinations: array[int], sources: array[int], sizes_bytes: array[int]) -> None:
        code = cudart.copy_to_host(destinations, sources, sizes_bytes, self._device, self._offloads.cuda_stream)
        if code:
            raise DeviceError(f"copies to host memory: CUDA refuses (cudaMemcpyBatchAsync: {code})")

    def wait(self, event: CopyEvent, cause: Cause) -> None:
        end = self._end_of(event)
        if end is None:
            return
        with self.stalling(cause):
            torch.cuda.current_stream(self._device).wait_event(end)

    @contextmanager
    def stalling(self, cause: Cause) -> Iterator[None]:
        """Between the two events the compute stream waits for what it is told to, or for the host to tell it more."""
        before, after = _timed_event(), _timed_event()
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        try:
            yield
        finally:
            after.record(stream)
            self._stalls.append(_Stall(cause, before, after))

    def done(self, event: CopyEvent) -> bool:
        end = self._end_of(event)
        return end is None or _over(end)

    def done_meanwhile(self, event: CopyEvent) -> bool:
        end = self._end_of(event)
        if end is None or _over(end):
            return True
        given = torch.cuda.Event()  # type: ignore[no-untyped-call]
        given.record(torch.cuda.current_stream(self._device))
        while not _over(given):
            if _over(end):
                return True
            time.sleep(_LOOK_S)
        return _over(end)

    def synchronize(self, event: CopyEvent, timeout_s: float | None = None) -> bool:
        end = self._end_of(event)
        if end is None:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is not None and not _over(end):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        end.synchronize()
        return True

    def release(self, snapshot: Snapshot, event: CopyEvent) -> None:
        """The stream that allocated it waits; the caller then drops the last reference and the memory is reused."""
        end = self._end_of(event)
        if end is None or _over(end):
            return
        assert isinstance(snapshot.stream, torch.cuda.Stream)
        with torch.cuda.stream(snapshot.stream):
            self.wait(event, Cause.RELEASE)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        if self._running:
            _over(self._running[0].end)  # raises a sticky CUDA error

    def collect(self) -> None:
        self._forget_ended()
        while self._stalls and _over(self._stalls[0].after):
            stall = self._stalls.popleft()
            self._counters.stalled(stall.cause, int(stall.before.elapsed_time(stall.after) * 1e6))

    def close(self) -> None:
        self._offloads.synchronize()
        self._running.clear()
        for address in self._registered:
            cudart.unregister_host(address)
        self._registered.clear()

    def _end_of(self, event: CopyEvent) -> torch.cuda.Event | None:
        """None for an offload that is known to have ended."""
        assert isinstance(event, CudaEvent)
        ended = not self._running or event.order < self._running[0].order
        return None if ended else event.end

    def _forget_ended(self) -> None:
        while self._running and _over(self._running[0].end):
            event = self._running.popleft()
            self._counters.link_busy_ns += int(event.start.elapsed_time(event.end) * 1e6)
            self._counters.offloaded_bytes += event.size_bytes


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
