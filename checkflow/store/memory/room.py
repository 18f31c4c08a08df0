"""Where slots lie in shared memory, how much of it they take, and whether there is as much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkflow.errors import StoreError
from checkflow.store.format.layout import ALIGN_BYTES, Layout, padded
from checkflow.store.memory.allowance import allowance
from checkflow.store.memory.mapping import HUGE_BYTES
from checkflow.units import format_bytes

MAX_SLOTS = 56  # as many as the control page has words for
CONTROL_BYTES = ALIGN_BYTES
LARGE_BYTES = 32 * 2**20  # slots from this size on are sealed while staged: 90 microseconds, a hundredth of the copy


@dataclass(frozen=True, slots=True)
class Room:
    """What slots take of shared memory."""

    slots: int  # of all lanes
    largest_bytes: int  # of the files of a slot
    head_bytes: int  # before the first slot
    strides: tuple[int, ...]  # by lane, from its slot to the next

    @classmethod
    def of(cls, layouts: Sequence[Layout], *, slots: int, record_room_bytes: int, config_bytes: int) -> Room:
        """Arguments as of `SharedMemory.create`."""
        largest = max(layout.size_bytes for layout in layouts)
        strides = tuple(stride(layout.size_bytes, padded(record_room_bytes), largest) for layout in layouts)
        return cls(slots, largest, head_bytes(largest, config_bytes), strides)

    @property
    def size_bytes(self) -> int:
        return self.head_bytes + self.slots // len(self.strides) * sum(self.strides)

    @property
    def need(self) -> str:
        up_to = "up to " if len(set(self.strides)) > 1 else ""
        of = f"{self.slots} slots of {up_to}{format_bytes(self.largest_bytes)}"
        return f"{of} need {format_bytes(self.size_bytes)} of shared memory"

    def check(self, *, given_back_bytes: int = 0) -> None:
        """Raises StoreError for a number of slots that cannot be, and where memory does not suffice.

        Others will have given so many bytes back by then.
        """
        lanes = len(self.strides)
        each = self.slots // lanes
        if not lanes <= self.slots <= MAX_SLOTS or self.slots % lanes:
            raise StoreError(f"slots: {each} is not supported; use 1 to {MAX_SLOTS // lanes}")
        free = allowance()
        if free is not None and self.size_bytes > free.free_bytes + given_back_bytes:
            advice = f"use slots={each - 1}" if each > 1 else "raise the limit"
            raise StoreError(
                f"slots: {self.need}, but {free.limit} leaves {format_bytes(free.free_bytes)}; {advice}, free memory, "
                "or train on a machine with more"
            )


def is_large(size_bytes: int) -> bool:
    """Whether slots of this size lie in huge pages of their own, and are sealed."""
    return size_bytes >= LARGE_BYTES


def stride(layout_bytes: int, room_bytes: int, largest_bytes: int) -> int:
    """From one slot to the next. Large ones share no huge page, which sealing one of them would break up."""
    return -(-(layout_bytes + room_bytes) // _unit(largest_bytes)) * _unit(largest_bytes)


def head_bytes(largest_bytes: int, config_bytes: int) -> int:
    """The first slot's first byte."""
    return -(-(CONTROL_BYTES + config_bytes) // _unit(largest_bytes)) * _unit(largest_bytes)


def _unit(largest_bytes: int) -> int:
    return HUGE_BYTES if is_large(largest_bytes) else ALIGN_BYTES
