"""Ranks stage, skip, persist and hear of each other in any order: what all have staged is in the memory of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_store import TINY, InProcess, record_of, silent, stage, until

from checkflow.store.format.ranks import WHOLE, directory_of, ranks_in
from checkflow.store.format.reader import list_checkpoints
from checkflow.store.memory.saver_slots import Taken, give_back, take_due, take_left
from checkflow.store.memory.shared_memory import SharedMemory, SlotState
from checkflow.store.memory.trainer_slots import Slots
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

MOST_RANKS = 3


class Rank:
    """One rank's slots, and what it has not heard yet."""

    def __init__(self, slots: int, *, waits: bool) -> None:
        self.shared = SharedMemory.create([TINY], slots=slots, record_room_bytes=100, config=b"{}")
        self.slots = Slots(self.shared, [TINY], "wait" if waits else "skip", grouped=True)
        self.iteration = 0
        self.staged: dict[int, int] = {}  # iteration -> sequence number
        self.unheard: list[int] = []  # iterations it staged
        self.taken: Taken | None = None

    def holds(self, iteration: int) -> bool:
        words = self.shared.words()
        return any(
            word.sequence == self.staged[iteration] and word.state in (SlotState.STAGED, SlotState.PERSISTING)
            for word in words
        )


class GroupMachine(RuleBasedStateMachine):
    """Ranks that train in step, within an iteration; rulings that are heard whenever they are."""

    @initialize(ranks=st.integers(2, MOST_RANKS), slots=st.integers(2, 4), waits=st.booleans(), every=st.integers(1, 4))
    def start(self, ranks: int, slots: int, waits: bool, every: int) -> None:
        self.ranks = [Rank(slots, waits=waits) for _ in range(ranks)]
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
        rank.iteration += 1
        slot = rank.slots.try_acquire()
        if slot is None:
            self.void.add(rank.iteration)
            return
        rank.slots.stage(slot, rank.iteration, record_of(rank.iteration), due=False)
        rank.staged[rank.iteration] = rank.slots.newest_sequence or 0
        rank.unheard.append(rank.iteration)

    def whole(self, iteration: int) -> bool:
        return iteration not in self.void and all(iteration in rank.staged for rank in self.ranks)

    @rule(index=st.integers(0, MOST_RANKS - 1))
    def hear(self, index: int) -> None:
        rank = self.ranks[index % len(self.ranks)]
        for iteration in tuple(rank.unheard):
            if self.whole(iteration):
                rank.slots.agree(rank.staged[iteration], due=iteration % self.every == 0)
            elif iteration in self.void:
                rank.slots.disown(rank.staged[iteration])
            else:
                continue
            rank.unheard.remove(iteration)

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
    assert not (saver.store / WHOLE).exists()
    saver.persister.agree(sequences[3])
    assert (saver.store / WHOLE).exists()
    persist(saver, 5)
    assert left() == [2, 3, 4, 5]  # the newest that all have, and as many as retention holds up to it
    saver.persister.agree(999)  # of another saver, which may have ended
    persist(saver, 6)
    assert left() == [2, 3, 4, 5, 6]
    saver.close()


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

    def skipped(self, iteration: int) -> None:
        raise AssertionError(iteration)

    def verified(self, attempt: int, iteration: int, serial: int, agreed: Callable[[], None]) -> None:
        assert serial == len(self.said) + 1
        self.said.append((attempt, iteration))
        agreed()

    def trouble(self) -> None:
        return None


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
