"""Ranks stage, skip, persist and hear of each other in any order: what all have staged is in the memory of each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_store import TINY, InProcess, fill, record_of, silent, stage, until

from checkflow.store.format.ranks import WHOLE, directory_of, note_whole, noted_whole, ranks_in
from checkflow.store.format.reader import list_checkpoints
from checkflow.store.memory.saver_slots import Taken, give_back, take_due, take_left
from checkflow.store.memory.shared_memory import SharedMemory, SlotState, Word
from checkflow.store.memory.trainer_slots import Slot, Slots
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

MOST_RANKS = 3


class Rank:
    """One rank's slots, and what it has not heard yet. With lanes a slot may be begun before the last one is staged."""

    def __init__(self, slots: int, *, waits: bool, lanes: int = 1, early: bool = False) -> None:
        layouts = [TINY] * lanes
        self.shared = SharedMemory.create(layouts, slots=slots * lanes, record_room_bytes=100, config=b"{}")
        self.slots = Slots(self.shared, layouts, "wait" if waits else "skip", grouped=True)
        self.lanes, self.early = lanes, early
        self.iteration = 0
        self.parts: list[int] = []  # of which iteration each lane's newest slot is, oldest first
        self.filled: list[Slot] = []  # not staged yet, of one iteration
        self.filled_parts: list[int] = []
        self.staged: dict[int, tuple[int, list[int]]] = {}  # iteration -> sequence number, and `parts`
        self.unheard: list[int] = []  # iterations it staged
        self.taken: Taken | None = None

    def train(self) -> bool:
        """Whether the next iteration will have a checkpoint."""
        self.iteration += 1
        iteration, whole = self.iteration, not self.parts or self.lanes == 1
        lanes = range(iteration + 1 if whole else iteration + self.lanes, iteration + self.lanes + 1)
        if whole or not self.early:
            self.stage()
        if whole:
            self.slots.break_off()
        slots = [self.slots.try_acquire(lane % self.lanes) for lane in lanes]
        self.stage()
        if None in slots:
            for slot in filter(None, slots):
                self.slots.abandon(slot)
            words = self.shared.words()
            assert not whole or self.unheard or self.taken or any(word.due for word in words), "stuck for good"
            self.parts = []
            return False
        self.filled = [slot for slot in slots if slot is not None]
        for slot in self.filled:
            fill(slot.data, TINY, iteration)
        self.parts = self.filled_parts = [iteration] * self.lanes if whole else [*self.parts[1:], iteration]
        if not self.early:
            self.stage()
        return True

    def stage(self) -> None:
        """What was filled."""
        for slot in self.filled:
            iteration, last = self.filled_parts[-1], slot is self.filled[-1]
            self.slots.stage(slot, iteration, record_of(iteration), due=False, whole=last)
            if last:
                self.staged[iteration] = self.slots.newest_sequence or 0, self.filled_parts
                self.unheard.append(iteration)
        self.filled = []

    def holds(self, iteration: int) -> bool:
        sequence, parts = self.staged[iteration]
        of = {word.sequence: index for index, word in enumerate(self.shared.words()) if _has_bytes(word)}
        slots = [of.get(each) for each in range(sequence - self.lanes + 1, sequence + 1)]
        return [None if slot is None else self._byte(slot) for slot in slots] == [each % 251 for each in parts]

    def _byte(self, slot: int) -> int:
        place = TINY.files[0].tensors[0]
        (value,) = set(self.shared.slot_bytes(slot)[place.offset_bytes : place.end_bytes])
        return value


def _has_bytes(word: Word) -> bool:
    return word.state in (SlotState.STAGED, SlotState.PERSISTING)


class GroupMachine(RuleBasedStateMachine):
    """Ranks that train in step, within an iteration; rulings that are heard whenever they are."""

    @initialize(
        lanes=st.lists(st.integers(1, 3), min_size=2, max_size=MOST_RANKS),
        slots=st.integers(2, 4), waits=st.booleans(), early=st.booleans(), every=st.integers(1, 4),
    )  # fmt: skip
    def start(self, lanes: list[int], slots: int, waits: bool, early: bool, every: int) -> None:
        self.ranks = [Rank(slots, waits=waits, lanes=many, early=early) for many in lanes]
        self.void: set[int] = set()
        self.every = every

    def teardown(self) -> None:
        for rank in getattr(self, "ranks", ()):
            rank.shared.close()

    @rule(index=st.integers(0, MOST_RANKS - 1))
    def train(self, index: int) -> None:
        rank = self.ranks[index % len(self.ranks)]
        if rank.iteration > min(other.iteration for other in self.ranks):
            return  # a collective waits for the others
        if not rank.train():
            self.void.add(rank.iteration)

    def whole(self, iteration: int) -> bool:
        return iteration not in self.void and all(iteration in rank.staged for rank in self.ranks)

    @rule(index=st.integers(0, MOST_RANKS - 1))
    def hear(self, index: int) -> None:
        rank = self.ranks[index % len(self.ranks)]
        for iteration in tuple(rank.unheard):
            if self.whole(iteration):
                rank.slots.agree(rank.staged[iteration][0], due=iteration % self.every == 0)
            elif iteration in self.void:
                rank.slots.disown(rank.staged[iteration][0])
            else:
                continue
            rank.unheard.remove(iteration)

    @rule(index=st.integers(0, MOST_RANKS - 1))
    def ask(self, index: int) -> None:
        """What is due then can be taken, the oldest first: nothing waits behind a slot that completes nothing."""
        rank = self.ranks[index % len(self.ranks)]
        asked = rank.slots.ask(keep=False)
        assert (asked is None) == (rank.slots.newest_sequence is None)
        if asked is not None and rank.taken is None:
            rank.taken = take_due(rank.shared)
            assert rank.taken is not None and rank.taken.record is not None

    @rule(index=st.integers(0, MOST_RANKS - 1))
    def take(self, index: int) -> None:
        rank = self.ranks[index % len(self.ranks)]
        rank.taken = rank.taken or take_due(rank.shared)

    @rule(index=st.integers(0, MOST_RANKS - 1))
    def write(self, index: int) -> None:
        rank = self.ranks[index % len(self.ranks)]
        if rank.taken is not None:
            give_back(rank.shared, rank.taken)
            rank.taken = None

    @invariant()
    def what_all_have_staged_all_still_have(self) -> None:
        if not hasattr(self, "ranks"):
            return
        newest = max((each for each in self.ranks[0].staged if self.whole(each)), default=None)
        assert newest is None or all(rank.holds(newest) for rank in self.ranks)
        going_on = (rank for rank in self.ranks if rank.lanes > 1 and rank.staged and rank.parts)
        assert all(rank.holds(max(rank.staged)) for rank in going_on)


GroupMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestGroup = GroupMachine.TestCase


def test_a_dead_trainers_saver_takes_all_that_is_staged() -> None:
    """Oldest first, each once."""
    rank = Rank(3, waits=False)
    for iteration in (1, 2, 3):
        slot = rank.slots.try_acquire()
        assert slot is not None
        rank.slots.stage(slot, iteration, record_of(iteration), due=False)
    done: set[int] = set()
    found = []
    while (taken := take_left(rank.shared, done)) is not None:
        done.add(taken.sequence)
        found.append(taken.iteration)
        give_back(rank.shared, taken)
    assert found == [1, 2, 3]
    assert rank.slots.try_acquire() is None  # not heard of any: all may be the one that the others have
    rank.slots.disown(3)
    rank.slots.agree(2, due=False)
    assert rank.slots.try_acquire() is not None
    rank.shared.close()


def persist(saver: InProcess, iteration: int) -> int:
    """Its sequence number."""
    taken = saver.take(iteration)
    written = saver.persister.write(taken)
    assert written is not None
    saver.persister.settle([written])
    saver.slots.agree(taken.sequence, due=False)
    return taken.sequence


def test_nothing_is_pruned_that_is_newer_than_what_all_have_verified(tmp_path: Path) -> None:
    saver = InProcess(tmp_path / "store", grouped=True)
    sequences = {iteration: persist(saver, iteration) for iteration in (1, 2, 3, 4)}

    def left() -> list[int]:
        return sorted(found.iteration for found in list_checkpoints(saver.store))

    assert left() == [1, 2, 3, 4]
    assert noted_whole(saver.store) is None
    saver.persister.agree(sequences[3])
    assert noted_whole(saver.store) == 3
    persist(saver, 5)
    assert left() == [2, 3, 4, 5]  # the newest that all have, and as many as retention holds up to it
    saver.persister.agree(999)  # of another saver, which may have ended
    persist(saver, 6)
    assert left() == [2, 3, 4, 5, 6]
    assert noted_whole(saver.store) == 3
    saver.persister.agree_on(5)  # by its serial: it was restored
    persist(saver, 7)
    assert (left(), noted_whole(saver.store)) == ([4, 5, 6, 7], 5)
    saver.close()


def test_what_is_noted_of_ranks_is_no_file_of_others(tmp_path: Path) -> None:
    whole, outside = tmp_path / WHOLE, tmp_path / "mine"
    whole.touch()  # as it was before it had a serial
    assert noted_whole(tmp_path) == 0
    for serial in (12, 3, 0):
        note_whole(tmp_path, serial)
        assert noted_whole(tmp_path) == serial
    whole.write_bytes(b"\xff" * 100)
    assert noted_whole(tmp_path) == 0
    outside.write_text("mine")
    makes: tuple[Callable[[], None], ...] = (partial(whole.symlink_to, outside), partial(os.mkfifo, whole), whole.mkdir)
    for make in makes:
        whole.unlink()
        make()
        assert noted_whole(tmp_path) is None
        with pytest.raises(OSError, match="file"):
            note_whole(tmp_path, 20)
    assert outside.read_text() == "mine"


class Alone:
    """Peers of a rank that is the only one; what it has said."""

    attempt = 1
    deadline_s = 60.0

    def __init__(self) -> None:
        self.said: list[tuple[int, int]] = []

    def staging(
        self, iteration: int, rules: Callable[[], bool], agreed: Callable[[bool | None], None]
    ) -> Callable[[], None]:
        del iteration
        return lambda: agreed(rules())

    def lags(self, iterations: int) -> None:
        raise AssertionError(iterations)

    def any_lags_more(self, iterations: int) -> bool:
        return iterations < 1

    def reads_whole(self, every: int) -> None:
        raise AssertionError(every)

    def whole_every(self) -> int:
        return 0

    def skipped(self, iteration: int) -> None:
        raise AssertionError(iteration)

    def verified(self, attempt: int, iteration: int, serial: int, agreed: Callable[[], None]) -> None:
        assert serial == len(self.said) + 1
        self.said.append((attempt, iteration))
        agreed()

    def failure(self) -> None:
        return None

    def trouble(self) -> None:
        return None


class Late(Alone):
    """Another rank has its part so many iterations after the checkpoint's own, where this one goes on."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        self.rulings: dict[int, Callable[[], None]] = {}

    def any_lags_more(self, iterations: int) -> bool:
        return iterations < self.iterations

    def staging(
        self, iteration: int, rules: Callable[[], bool], agreed: Callable[[bool | None], None]
    ) -> Callable[[], None]:
        del rules
        self.rulings[iteration] = lambda: agreed(False)  # of what is due a slot would be free once it is durable
        return lambda: None


@pytest.mark.parametrize("iterations", [2, 3])
def test_a_slot_is_not_waited_for_that_needs_the_next_iteration(iterations: int, tmp_path: Path) -> None:
    """Ranks end iterations together: who waits for a part that another one has in the next waits for itself."""
    peers = Late(iterations)
    with StoreHandle.open(tmp_path, [TINY], notify=silent, peers=peers, when_full="wait") as handle:
        for iteration in (1, 2, 3):
            slot = handle.acquire(0, iteration)
            assert slot is not None
            handle.stage(slot, iteration, record_of(iteration))
            if iteration == 1:
                peers.rulings[1]()
        ruled = threading.Timer(0.3, peers.rulings[2])
        if iterations == 2:
            ruled.start()
        slot = handle.acquire(0, 4)
        assert (slot is None) == (iterations == 3)
        ruled.cancel()
        for iteration in (2, 3):
            peers.rulings[iteration]()
        if slot is not None:
            handle.abandon(slot)


def test_what_is_read_back_after_a_restore_is_of_the_attempt_in_which_it_was_staged(tmp_path: Path) -> None:
    """Else it would count for an iteration that was trained again, and its older ones be pruned too early."""
    peers = Alone()
    every = PersistEvery(iterations=1)

    def is_read_back() -> bool:
        handle.poll()
        return len(peers.said) == len(staged)

    with StoreHandle.open(tmp_path, [TINY], notify=silent, persist_every=every, peers=peers) as handle:
        staged = []
        for attempt, iteration in ((1, 5), (2, 4), (2, 5)):
            peers.attempt = attempt
            stage(handle, TINY, iteration)
            assert handle.drain(60)
            peers.attempt = attempt + 1  # before it is told
            staged.append((attempt, iteration))
            until(is_read_back, "it is read back")
    assert peers.said == staged


def test_directories_of_ranks_are_known_by_their_names(tmp_path: Path) -> None:
    for name in ("rank-0-of-2", "rank-1-of-2", "rank-2-of-3", "rank-3-of-3", "rank-01-of-4", "rank-0-of-2 ", "ranks"):
        (tmp_path / name).mkdir()
    assert ranks_in(tmp_path) == {2: (0, 1), 3: (2,)}
    assert ranks_in(tmp_path / "none") == {}
    assert directory_of(1, 2) == "rank-1-of-2"


def test_lanes_that_break_off_begin_anew_where_no_rank_agrees() -> None:
    """The newest that all have stays, and nothing goes on from a newer one, of which another rank has no part."""
    rank = Rank(2, waits=False, lanes=2)
    assert rank.train()
    rank.slots.agree(rank.staged[1][0], due=False)
    for iteration in (2, 3):
        assert rank.train()
        rank.slots.disown(rank.staged[iteration][0])
    rank.unheard = []
    assert not rank.train()  # the fourth would take the place of the second, which the third goes on from
    assert rank.holds(3)
    assert rank.train()
    assert rank.holds(1) and rank.holds(5)
    rank.shared.close()


class Troubled(Alone):
    """They part while the store is closed."""

    troubles = ""

    def trouble(self) -> str | None:  # type: ignore[override]
        return self.troubles or None


def test_what_troubles_ranks_while_a_store_is_closed_is_told_with_its_path(tmp_path: Path) -> None:
    peers, told = Troubled(), list[str]()
    with StoreHandle.open(tmp_path, [TINY], notify=told.append, peers=peers):
        peers.troubles = "rank 1 is gone"
    assert told == [f"{tmp_path}: rank 1 is gone"]


class Parted(Alone):
    """Of each checkpoint they rule that some rank has no part."""

    def staging(
        self, iteration: int, rules: Callable[[], bool], agreed: Callable[[bool | None], None]
    ) -> Callable[[], None]:
        del iteration, rules
        return lambda: agreed(None)


def test_what_was_ruled_to_lack_a_part_is_not_said_to_be_verified(tmp_path: Path) -> None:
    """Though it was saved: every rank would take it for whole, and prune what is."""
    peers = Parted()
    with StoreHandle.open(
        tmp_path, [TINY], notify=silent, persist_every=PersistEvery(iterations=1), peers=peers
    ) as handle:
        stage(handle, TINY, 5)
        assert handle.persist_now(keep=True) is not None
        assert handle.drain(60)

        def is_read_back() -> bool:
            handle.poll()
            return handle.status().verified_iteration == 5

        until(is_read_back, "it is read back")
    assert peers.said == []
