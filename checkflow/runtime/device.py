"""What the executor asks of a device. `host.py` and `cuda.py` implement it with the same meaning.

The *compute stream* is where the training's own operators run, in order; on the host it is the training thread. One
*offload stream* copies to slots in the order in which `offload` was called (a FIFO link).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from checkflow.runtime.counters import Cause

SMALL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes to move: flat uint8 tensors of one length."""

    destination: torch.Tensor  # in a slot
    source: torch.Tensor  # live state, or a snapshot


class Batch(tuple[Copy, ...]):
    """Copies that leave together. The same ones do for each checkpoint, so what is found out about them is kept."""

    @cached_property
    def size_bytes(self) -> int:
        return sum(copy.source.numel() for copy in self)

    @cached_property
    def lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Destinations and sources, for torch's foreach."""
        return [copy.destination for copy in self], [copy.source for copy in self]

    @cached_property
    def places(self) -> tuple[array[int], array[int]]:
        """Addresses and sizes of the destinations, for the CUDA runtime. Slots do not move; sources may."""
        return array("Q", [c.destination.data_ptr() for c in self]), array("Q", [c.destination.numel() for c in self])

    @cached_property
    def small(self) -> Batch:
        """Those that are not worth a call each."""
        return Batch(copy for copy in self if copy.source.numel() <= SMALL_BYTES)

    @cached_property
    def large(self) -> Batch:
        """The others."""
        return Batch(copy for copy in self if copy.source.numel() > SMALL_BYTES)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of state in device memory, or a gradient that is held; its memory returns when `release` drops it."""

    data: torch.Tensor  # uint8
    stream: object = None  # the compute stream it was made on


class CopyEvent(Protocol):
    """The end of one `offload`. Later offloads have a higher `order` and end later."""

    @property
    def order(self) -> int: ...


class Device(Protocol):
    """Errors of the copying itself are raised by the next call, as DeviceError."""

    few_bytes: int  # so few leave with others, though the link could have them apart
    is_host: bool  # so that the host is never ahead of it

    def register(self, address: int, size_bytes: int) -> None:
        """Prepare the slots' memory for fast copies, once. Raises DeviceError where that is refused."""

    def snapshot(self, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        """Copies in device memory, made on the compute stream. Raises DeviceError where there is no memory."""

    def hold(self, source: torch.Tensor) -> Snapshot:
        """Bytes that nothing writes any more, kept where they are."""

    def offload(self, batch: Batch) -> CopyEvent:
        """Copy to slots on the offload stream, behind all that the compute stream was given so far."""

    def wait(self, event: CopyEvent, cause: Cause) -> None:
        """The compute stream waits for an offload; the stall is counted under `cause`."""

    def done(self, event: CopyEvent) -> bool:
        """Whether an offload has ended. Never blocks."""

    def done_meanwhile(self, event: CopyEvent) -> bool:
        """Whether an offload ends before the compute stream has nothing more to do; the host waits for either."""

    def synchronize(self, event: CopyEvent, timeout_s: float | None = None, /) -> bool:
        """The host waits until an offload has ended; False where that took longer."""

    def stalling(self, cause: Cause, /) -> AbstractContextManager[None]:
        """The host waits within; what the compute stream has nothing to do of that time is counted under `cause`."""

    def release(self, snapshot: Snapshot, event: CopyEvent, /) -> None:
        """Return a snapshot's memory: the compute stream waits for the offload that reads it, then frees."""

    def capturing(self) -> bool:
        """Whether operators are being recorded (a CUDA graph) and not run."""

    def check(self) -> None:
        """Raise what went wrong in the background. Never blocks."""

    def collect(self) -> None:
        """Bring the counters up to date."""

    def close(self) -> None:
        """Stop. What was not synchronized is lost."""
