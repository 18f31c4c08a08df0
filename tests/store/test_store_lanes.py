"""Checkpoints in lanes: a slot of each lane, in every order of what trainer and saver may do, and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_store import TINY, fill, record_of, silent

from checkflow.errors import StoreError
from checkflow.lanes import lane_file, lane_of
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.reader import load_newest
from checkflow.store.memory.saver_slots import Taken, give_back, give_up, put_off, recover, take_due, take_last
from checkflow.store.memory.shared_memory import SharedMemory, SlotState
from checkflow.store.memory.trainer_slots import Slots
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

LANES = 3


class LaneMachine(RuleBasedStateMachine):
    """A trainer that fills lanes in turn, or all at once where it lost one; a saver that may die while persisting."""

    def __init__(self) -> None:
        super().__init__()
        self.iteration = 0
        self.unbroken = False
        self.held: list[list[int]] = []  # by staged checkpoint: the iteration of each of its slots, oldest first
        self.taken: Taken | None = None
        self.kept_bytes: list[bytes] = []

    @initialize(rows=st.integers(2, 3), when_full=st.sampled_from(["skip", "wait"]))
    def start(self, rows: int, when_full: Literal["skip", "wait"]) -> None:
        layouts = [TINY] * LANES
        self.shared = SharedMemory.create(layouts, slots=rows * LANES, record_room_bytes=100, config=b"{}")
        self.slots = Slots(self.shared, layouts, when_full)

    def teardown(self) -> None:
        if hasattr(self, "shared"):
            self.shared.close()

    @precondition(lambda self: self.unbroken)
    @rule(due=st.booleans())
    def one_lane(self, due: bool) -> None:
        """The next iteration fills the slot of its lane."""
        self.iteration += 1
        slot = self.slots.try_acquire(self.iteration % LANES)
        if slot is None:
            self.unbroken = False
            return
        fill(slot.data, TINY, self.iteration)
        self.slots.stage(slot, self.iteration, record_of(self.iteration), due=due)
        self.held.append([*self.held[-1][1:], self.iteration])

    @rule(due=st.booleans(), lost=st.integers(0, 2 * LANES))
    def each_lane(self, due: bool, lost: int) -> None:
        """The next iteration fills a slot of each lane, or as many as it comes to before something goes wrong."""
        self.iteration += 1
        self.unbroken = False
        found = [self.slots.try_acquire((self.iteration + 1 + place) % LANES) for place in range(LANES)]
        for place, slot in enumerate(found):
            if slot is None or None in found or place >= lost > 0:
                if slot is not None:
                    self.slots.abandon(slot)
                continue
            fill(slot.data, TINY, self.iteration)
            last = place == LANES - 1
            self.slots.stage(slot, self.iteration, record_of(self.iteration), due=due and last, whole=last)
            if last:
                self.unbroken = True
                self.held.append([self.iteration] * LANES)

    @rule(keep=st.booleans())
    def ask(self, keep: bool) -> None:
        assert (self.slots.ask(keep=keep) is not None) == bool(self.held)

    @precondition(lambda self: self.taken is None)
    @rule()
    def take(self) -> None:
        self._look(take_due(self.shared))

    @precondition(lambda self: self.taken is None and self.held)
    @rule()
    def take_what_a_dead_trainer_left(self) -> None:
        taken = take_last(self.shared)
        if taken is not None:
            assert taken.iteration == self.held[-1][-1]
        self._look(taken)

    def _look(self, taken: Taken | None) -> None:
        self.taken = taken
        if taken is not None:
            assert taken.record == record_of(taken.iteration)
            expected = next(one for one in self.held if one[-1] == taken.iteration)
            assert [self._bytes(slot) for slot in taken.slots] == [iteration % 251 for iteration in expected]
            assert sorted(slot % LANES for slot in taken.slots) == list(range(LANES))

    def _bytes(self, slot: int) -> int:
        place = TINY.files[0].tensors[0]
        (value,) = set(self.shared.slot_bytes(slot)[place.offset_bytes : place.end_bytes])
        return value

    @precondition(lambda self: self.taken is not None)
    @rule(how=st.sampled_from([give_back, give_up, put_off, put_off, "die"]), newest_wins=st.booleans())
    def end(self, how: object, newest_wins: bool) -> None:
        """What was taken is still as it was."""
        assert self.taken is not None
        expected = next(one for one in self.held if one[-1] == self.taken.iteration)
        assert [self._bytes(slot) for slot in self.taken.slots] == [iteration % 251 for iteration in expected]
        if how == "die":
            recover(self.shared)
        elif how is put_off:
            put_off(self.shared, self.taken, newest_wins=newest_wins)
        else:
            how(self.shared, self.taken)  # type: ignore[operator]
        self.taken = None

    @invariant()
    def newest_is_there(self) -> None:
        """Whatever was done, the slots of the newest checkpoint are as they were staged."""
        if self.held:
            newest = self.slots.newest_sequence
            assert newest is not None
            of = {word.sequence: index for index, word in enumerate(self.shared.words()) if word.sequence}
            slots = [of[sequence] for sequence in range(newest - LANES + 1, newest + 1)]
            assert [self._bytes(slot) for slot in slots] == [iteration % 251 for iteration in self.held[-1]]
            held = [self.shared.word(slot).state for slot in slots]
            assert set(held) <= {SlotState.STAGED, SlotState.PERSISTING}


LaneMachine.TestCase.settings = settings(stateful_step_count=60)
TestLanes = LaneMachine.TestCase


def _layout(lane: int) -> Layout:
    """Lanes of other sizes."""
    return Layout.of((FileSpec("model.safetensors", (TensorSpec(f"w{lane}", "U8", (100 + 5000 * lane,)),)),))


@contextmanager
def _opened(store: Path) -> Iterator[StoreHandle]:
    layouts = [_layout(lane) for lane in range(LANES)]
    with StoreHandle.open(store, layouts, notify=silent, persist_every=PersistEvery(iterations=1)) as handle:
        yield handle


def test_a_directory_has_the_files_of_each_lane(tmp_path: Path) -> None:
    """Each lane's with its own iteration's bytes; no checkpoint on disk needs another."""
    with _opened(tmp_path) as handle:
        for iteration in range(1, 8):
            lanes = range(LANES) if iteration == 1 else [iteration % LANES]
            for place, lane in enumerate(sorted(lanes, key=lambda lane: (lane - 2) % LANES)):
                slot = handle.acquire(lane)
                assert slot is not None
                fill(slot.data, slot.layout, iteration)
                whole = place == len(list(lanes)) - 1
                handle.stage(slot, iteration, record_of(iteration), whole=whole)
            assert handle.drain(60)
    loaded = load_newest(tmp_path).loaded
    assert loaded is not None and loaded.checkpoint.iteration == 7
    assert set(loaded.files) == {lane_file(lane, "model.safetensors") for lane in range(LANES)}
    for lane in range(LANES):
        (tensor,) = _layout(lane).files[0].tensors
        data = loaded.files[lane_file(lane, "model.safetensors")]
        assert set(data[-tensor.spec.size_bytes :]) == {7 - (7 - lane) % LANES}


@pytest.mark.parametrize("slots", [0, 2, 4, 57])
def test_each_lane_has_as_many_slots(slots: int) -> None:
    with pytest.raises(StoreError, match="use 1 to 18"):
        SharedMemory.create([TINY] * LANES, slots=slots, record_room_bytes=100, config=b"{}")


def test_names_of_files_are_those_of_lanes_or_not() -> None:
    assert lane_of(lane_file(12, "model.0.safetensors")) == (12, "model.0.safetensors")
    for other in ("model.safetensors", "lane-.model", "lane-1model", "lane-100.model", "lane-\u0661.model"):
        assert lane_of(other) is None
