"""Slots of a replica, in every order of what trainer, saver and the process between them may do, each of which dies."""

from __future__ import annotations

import os
import socket
from typing import Literal

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_store import TINY, fill, record_of

from checkflow.replica import loop
from checkflow.store.memory.replica_slots import (
    DELTA,
    KINDS,
    WHOLE,
    Step,
    clear_unfinished,
    forget_trainer,
    free_slots,
    give_up_deltas,
    hold,
    is_held,
    made,
    next_step,
)
from checkflow.store.memory.saver_slots import Taken, give_back, give_up, put_off, recover, take_due, take_last
from checkflow.store.memory.shared_memory import SharedMemory, SlotState, Word
from checkflow.store.memory.trainer_slots import Slot, Slots


def shared_of(rows: int) -> SharedMemory:
    return SharedMemory.create([TINY] * KINDS, slots=rows * KINDS, record_room_bytes=100, config=b"{}")


class ReplicaMachine(RuleBasedStateMachine):
    """Every byte of a slot is its iteration's. To bring the replica on is to see a delta's beside those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.iteration = 0
        self.goes_on = False  # the next delta goes on from what was staged last
        self.staged: list[int] = []
        self.sequences: dict[int, int] = {}  # by iteration
        self.filling: list[Slot] = []
        self.step: Step | None = None
        self.taken: Taken | None = None
        self.due: set[int] = set()  # iterations

    @initialize(rows=st.integers(2, 3), when_full=st.sampled_from(["skip", "wait"]))
    def start(self, rows: int, when_full: Literal["skip", "wait"]) -> None:
        self.when_full = when_full
        self.shared = shared_of(rows)
        self.slots = Slots(self.shared, [TINY] * KINDS, when_full, replica=True)

    def teardown(self) -> None:
        if hasattr(self, "shared"):
            self.shared.close()

    @rule(due=st.booleans(), is_lost=st.booleans(), whole=st.booleans())
    def iterate(self, due: bool, is_lost: bool, whole: bool) -> None:
        """An iteration's delta, or all of it where the one before has no checkpoint; or it is lost on the way."""
        self.iteration += 1
        kind = DELTA if self.goes_on and not whole else WHOLE
        slot = self.slots.try_acquire(kind)
        event(f"{'delta' if kind == DELTA else 'whole'}: {slot is not None}")
        self.goes_on = slot is not None and not is_lost
        if slot is None:
            return
        assert self.step is None or slot.index not in (self.step.base, self.step.delta, self.step.into)
        fill(slot.data, TINY, self.iteration)
        if is_lost:
            self.slots.abandon(slot)
            return
        if self.slots.stage(slot, self.iteration, record_of(self.iteration), due=due):
            self.due = {self.iteration} | (self.due if self.when_full == "wait" else set())
        self.staged.append(self.iteration)
        self.sequences[self.iteration] = self.slots.newest_sequence or 0

    @rule(keep=st.booleans())
    def ask(self, keep: bool) -> None:
        if self.slots.ask(keep=keep) is not None:
            self.due.add(self.staged[-1])

    @precondition(lambda self: self.step is None)
    @rule()
    def begin_a_step(self) -> None:
        self.step = next_step(self.shared)
        event(f"a step: {self.step is not None}")
        if self.step is not None:
            fill(self.shared.slot_bytes(self.step.into), TINY, 250)

    @precondition(lambda self: self.step is not None)
    @rule(dies=st.booleans())
    def end_the_step(self, dies: bool) -> None:
        """What it reads is still as it was."""
        assert self.step is not None
        if dies:
            clear_unfinished(self.shared)
        else:
            self._finish(self.step)
        self.step = None

    def _finish(self, step: Step) -> None:
        found = self.shared.record(step.delta)
        assert found is not None
        iteration, record = found
        assert self._byte(step.delta) == iteration % 251
        assert self._byte(step.base) == (iteration - 1) % 251
        fill(self.shared.slot_bytes(step.into), TINY, iteration)
        made(self.shared, step, iteration, record)

    @precondition(lambda self: self.taken is None)
    @rule()
    def take(self) -> None:
        self._look(take_due(self.shared))

    @precondition(lambda self: self.taken is None and self.staged)
    @rule()
    def lose_the_trainer(self) -> None:
        """What it staged last is brought on to, whatever was being done, and is what is written then."""
        if self.step is not None:
            clear_unfinished(self.shared)
            self.step = None
        while (due := take_due(self.shared)) or (step := next_step(self.shared)):
            if due is not None:
                give_back(self.shared, due)
            elif step is not None:
                self._finish(step)
        last = self.sequences[self.staged[-1]]
        taken = take_last(self.shared)
        assert (taken is None) == (self.shared.durable_sequence >= last)
        if taken is not None:
            assert taken.iteration == self.staged[-1]
            self._look(taken)

    def _look(self, taken: Taken | None) -> None:
        self.taken = taken
        if taken is not None:
            assert taken.record == record_of(taken.iteration)
            (slot,) = taken.slots
            assert slot % KINDS == WHOLE and self._byte(slot) == taken.iteration % 251

    @precondition(lambda self: self.taken is not None)
    @rule(how=st.sampled_from([give_back, give_up, put_off, put_off, "die"]), newest_wins=st.booleans())
    def end(self, how: object, newest_wins: bool) -> None:
        """What was taken is still as it was."""
        assert self.taken is not None
        assert self._byte(self.taken.index) == self.taken.iteration % 251
        if how == "die":
            recover(self.shared)
        elif how is put_off:
            put_off(self.shared, self.taken, newest_wins=newest_wins)
        else:
            how(self.shared, self.taken)  # type: ignore[operator]
            self.due.discard(self.taken.iteration)
        self.taken = None

    def _byte(self, slot: int) -> int:
        place = TINY.files[0].tensors[0]
        (value,) = set(self.shared.slot_bytes(slot)[place.offset_bytes : place.end_bytes])
        return value

    @invariant()
    def newest_is_there(self) -> None:
        """Whole, or as deltas one after the other that go on from a whole one."""
        if not self.staged:
            return
        sequence = self.slots.newest_sequence
        assert sequence is not None
        words = self.shared.words()
        by_sequence = {
            kind: {words[i].sequence: i for i in range(kind, len(words), KINDS) if self._is_staged(i)}
            for kind in (WHOLE, DELTA)
        }
        iteration = self.staged[-1]
        while sequence not in by_sequence[WHOLE]:
            assert self._byte(by_sequence[DELTA][sequence]) == iteration % 251
            sequence, iteration = sequence - 1, iteration - 1
        assert self._byte(by_sequence[WHOLE][sequence]) == iteration % 251

    def _is_staged(self, slot: int) -> bool:
        return self.shared.word(slot).state in (SlotState.STAGED, SlotState.PERSISTING)


ReplicaMachine.TestCase.settings = settings(stateful_step_count=60)
TestReplica = ReplicaMachine.TestCase


def staged(slots: Slots, kind: int, iteration: int, *, due: bool = False) -> None:
    slot = slots.try_acquire(kind)
    assert slot is not None
    fill(slot.data, TINY, iteration)
    slots.stage(slot, iteration, record_of(iteration), due=due)


def test_what_is_due_stays_due_as_it_is_made_whole() -> None:
    """Nobody takes a delta; of what is given up those that were due are named."""
    shared = shared_of(3)
    slots = Slots(shared, [TINY] * KINDS, "wait", replica=True)
    staged(slots, WHOLE, 1)
    staged(slots, DELTA, 2, due=True)
    staged(slots, DELTA, 3)
    assert take_due(shared) is None and slots.pending and slots.awaits_replica
    step = next_step(shared)
    assert step is not None
    made(shared, step, 2, record_of(2))
    taken = take_due(shared)
    assert taken is not None and taken.iteration == 2
    staged(slots, DELTA, 4, due=True)
    assert [(word.sequence, word.due) for word in give_up_deltas(shared)] == [(3, False), (4, True)]
    assert next_step(shared) is None
    assert slots.newest_sequence is None and not slots.awaits_replica
    shared.close()


def test_a_process_is_seen_while_it_holds_the_memory() -> None:
    """By a lock of its own, beside those of the words."""
    shared = shared_of(2)
    assert not is_held(shared)
    with shared.locked():
        held = hold(shared)
    assert is_held(shared) and is_held(shared)
    os.close(held)
    assert not is_held(shared)
    shared.close()


def opened(rows: int = 3) -> tuple[SharedMemory, Slots]:
    shared = shared_of(rows)
    return shared, Slots(shared, [TINY] * KINDS, "wait", replica=True)


def held_by(shared: SharedMemory, kind: int) -> set[int]:
    """Sequence numbers of a kind's slots that nothing may fill."""
    words = shared.words()
    free = free_slots(words, kind)
    return {words[index].sequence for index in range(kind, len(words), KINDS) if index not in free}


def test_whole_slots_that_something_needs_are_not_filled() -> None:
    """The newest, what is due, and what a delta that is due goes on from, also when there is something newer."""
    shared, slots = opened()
    staged(slots, WHOLE, 1)
    assert held_by(shared, WHOLE) == {1}
    staged(slots, WHOLE, 2)
    assert held_by(shared, WHOLE) == {2}
    staged(slots, DELTA, 3, due=True)
    staged(slots, WHOLE, 4, due=True)
    assert held_by(shared, WHOLE) == {2, 4} and held_by(shared, DELTA) == {3}
    assert slots.try_acquire(WHOLE) is None  # the last one is left for what is made of the delta
    step = next_step(shared)
    assert step is not None and step.sequence == 3
    shared.close()


def test_what_is_worked_at_is_not_filled() -> None:
    """Though something newer has been staged meanwhile; once it is made, or its maker is dead, it may be."""
    for dies in (False, True):
        shared, slots = opened()
        staged(slots, WHOLE, 1)
        staged(slots, DELTA, 2)
        step = next_step(shared)
        assert step is not None
        staged(slots, WHOLE, 3)
        assert held_by(shared, WHOLE) == {1, 2, 3} and held_by(shared, DELTA) == {2}
        if dies:
            clear_unfinished(shared)
        else:
            made(shared, step, 2, record_of(2))
        assert held_by(shared, WHOLE) == {3} and not held_by(shared, DELTA)
        shared.close()


def test_deltas_that_lead_to_nothing_newer_may_be_filled() -> None:
    """The process that would give them up may still be starting."""
    shared, slots = opened()
    staged(slots, WHOLE, 1)
    for iteration in (2, 3, 4):
        staged(slots, DELTA, iteration)
    assert slots.try_acquire(DELTA) is None
    staged(slots, WHOLE, 5)
    assert not held_by(shared, DELTA)
    staged(slots, DELTA, 6)
    step = next_step(shared)
    assert step is not None and step.sequence == 6
    assert {word.sequence for word in shared.words()[DELTA::KINDS]} == {0, 6}
    shared.close()


def test_what_is_asked_of_a_delta_without_a_base_is_asked_of_the_newest() -> None:
    """None is made of it, whatever became of what it goes on from."""
    shared, slots = opened()
    staged(slots, WHOLE, 1)
    staged(slots, DELTA, 2, due=True)
    shared.set_word(WHOLE, Word(SlotState.FREE))
    staged(slots, WHOLE, 3)
    assert next_step(shared) is None
    taken = take_due(shared)
    assert taken is not None and taken.iteration == 3
    shared.close()


def test_without_trainer_and_saver_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody frees the slot that it would need; a saver frees what a dead trainer was filling."""
    monkeypatch.setattr(loop, "ORPHAN_S", 0.2)
    monkeypatch.setattr(loop, "Replica", lambda _: None)
    shared, slots = opened(2)
    staged(slots, WHOLE, 1)
    assert slots.try_acquire(WHOLE) is not None
    staged(slots, DELTA, 2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    loop.run(shared, theirs)
    assert next_step(shared) is None
    forget_trainer(shared)
    assert next_step(shared) is not None
    theirs.close()
    shared.close()


def test_what_a_slot_was_being_filled_with_is_given_up_too() -> None:
    """Once its process is dead; with two slots of a kind there would be none left."""
    shared, slots = opened(2)
    staged(slots, WHOLE, 1)
    staged(slots, DELTA, 2)
    assert next_step(shared) is not None
    assert [word.sequence for word in give_up_deltas(shared)] == [2]
    assert slots.try_acquire(WHOLE) is not None
    shared.close()


def test_what_is_newer_is_not_written_before_what_is_due() -> None:
    """A whole one waits for the deltas before it; where these find no slot to be made in, they give way to it."""
    shared, slots = opened(3)
    staged(slots, WHOLE, 1)
    staged(slots, DELTA, 2, due=True)
    staged(slots, WHOLE, 3, due=True)
    assert take_due(shared) is None
    step = next_step(shared)
    assert step is not None and take_due(shared) is None
    made(shared, step, 2, record_of(2))
    for iteration in (2, 3):
        taken = take_due(shared)
        assert taken is not None and taken.iteration == iteration
        give_back(shared, taken)
    shared.close()


def test_who_was_interrupted_gives_back_its_own_slots_alone() -> None:
    """The replica goes on in its slot; nobody else gets it meanwhile."""
    shared = shared_of(2)
    while shared.pages.wait_for_more():
        pass
    slots = Slots(shared, [TINY] * KINDS, "skip", replica=True)
    for iteration, kind in ((1, WHOLE), (2, DELTA)):
        slot = slots.try_acquire(kind)
        assert slot is not None
        slots.stage(slot, iteration, record_of(iteration), due=False)
    step = next_step(shared)
    mine = slots.try_acquire(DELTA)
    assert step is not None and mine is not None
    slots.reclaim(())
    assert shared.word(mine.index).state is SlotState.FREE
    assert shared.word(step.into) == Word(SlotState.FILLING, step.sequence)
    assert slots.try_acquire(WHOLE) is None
    made(shared, step, 2, record_of(2))
    assert shared.word(step.into) == Word(SlotState.STAGED, step.sequence)
    shared.close()
