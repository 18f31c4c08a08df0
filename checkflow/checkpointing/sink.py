"""The store as the runtime's sink."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection
from dataclasses import dataclass

from checkflow.checkpointing.files import file_and_tensor
from checkflow.runtime.lifecycle import Inside
from checkflow.runtime.sink import NamedSlot
from checkflow.state.names import StateName
from checkflow.store.memory.trainer_slots import Slot
from checkflow.store.trainer.handle import StoreHandle

POLL_S = 1.0  # hearing the saver takes a fifth of a millisecond, which short iterations would pay each


@dataclass(frozen=True, slots=True)
class _StoreSlot:
    """A slot by state names. Its views keep no hold on the mapping, which has to be closed with the store."""

    slot: Slot

    @property
    def index(self) -> int:
        return self.slot.index

    def view(self, name: StateName) -> memoryview:
        place = self.slot.layout.find(*file_and_tensor(name))
        return memoryview((ctypes.c_ubyte * place.spec.size_bytes).from_address(self.slot.address + place.offset_bytes))


class StoreSink:
    """The store as the runtime's sink."""

    def __init__(self, handle: StoreHandle, inside: Inside) -> None:
        self._handle = handle
        self._inside = inside
        self._next_poll_s = 0.0  # time.monotonic

    def try_acquire(self, lane: int = 0) -> _StoreSlot | None:
        slot = self._handle.try_acquire(lane)
        return None if slot is None else _StoreSlot(slot)

    def acquire(self, lane: int = 0, completed: int | None = None) -> _StoreSlot | None:
        slot = self._handle.acquire(lane, completed)
        return None if slot is None else _StoreSlot(slot)

    def stage(self, slot: NamedSlot, iteration: int, record: bytes, *, whole: bool = True) -> None:
        assert isinstance(slot, _StoreSlot)
        self._handle.stage(slot.slot, iteration, record, whole=whole)

    def abandon(self, slot: NamedSlot) -> None:
        assert isinstance(slot, _StoreSlot)
        self._handle.abandon(slot.slot)

    def reclaim(self, but: Collection[int]) -> None:
        self._handle.reclaim(but)

    def break_off(self) -> None:
        self._handle.break_off()

    def pass_over(self, iteration: int) -> None:
        self._handle.skipped(iteration)

    def poll(self) -> None:
        now = time.monotonic()
        if now >= self._next_poll_s:
            self._next_poll_s = now + POLL_S
            with self._inside:
                self._handle.poll()
