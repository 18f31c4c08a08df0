"""Slots that this process may only read while they are staged, and what the system refuses of that."""

from __future__ import annotations

import pytest
from small_store import TINY

from checkflow.errors import StoreError
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.memory import shared_memory
from checkflow.store.memory.mapping import protect
from checkflow.store.memory.room import LARGE_BYTES
from checkflow.store.memory.shared_memory import SharedMemory, SlotState, Word
from checkflow.store.memory.trainer_slots import Slots


def test_a_process_without_mappings_to_spare_fills_slots_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsealing one between two that are sealed takes two more; all of them, none."""
    large = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (LARGE_BYTES,)),)),))
    shared = SharedMemory.create([large], slots=3, record_room_bytes=4096, config=b"{}")
    while shared.pages.wait_for_more():
        pass
    slots, calls = Slots(shared, [large], "skip"), list[tuple[int, bool]]()

    def scarce(address: int, size_bytes: int, *, writable: bool) -> bool:
        calls.append((size_bytes, writable))
        return (not writable or size_bytes > 2 * LARGE_BYTES) and protect(address, size_bytes, writable=writable)

    def fill(iteration: int) -> None:
        slot = slots.try_acquire()
        assert slot is not None
        slot.data[LARGE_BYTES - 1] = iteration
        slots.stage(slot, iteration, b"{}", due=False)

    for iteration in (1, 2, 3):
        fill(iteration)
    monkeypatch.setattr(shared_memory, "protect", scarce)
    for iteration in (4, 5, 6, 7):
        fill(iteration)
    assert [writable for _, writable in calls] == [True, True]  # one, then all; and none is sealed again
    shared.close()


def test_a_slot_that_cannot_be_written_is_an_error_and_stays_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory.create([TINY], slots=1, record_room_bytes=4096, config=b"{}")
    while shared.pages.wait_for_more():
        pass
    slots = Slots(shared, [TINY], "skip")
    slot = slots.try_acquire()
    assert slot is not None
    slots.stage(slot, 1, b"{}", due=False)
    shared.set_word(0, Word(SlotState.STAGED, 1))
    shared._sealed.add(0)
    monkeypatch.setattr(shared_memory, "protect", lambda *_args, **_words: False)
    with pytest.raises(StoreError, match=r"raise vm\.max_map_count"):
        slots.try_acquire()
    assert shared.word(0) == Word(SlotState.STAGED, 1)
    shared.close()
