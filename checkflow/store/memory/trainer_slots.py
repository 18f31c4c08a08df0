"""The trainer's side of the slots: take one, fill it, stage it.

One thread of the trainer calls these; the saver's side is in saver_slots.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from checkflow.errors import StoreError
from checkflow.store.format.layout import Layout
from checkflow.store.memory.replica_slots import DELTA, KINDS, WHOLE, deltas_in, free_slots, spared
from checkflow.store.memory.shared_memory import NOT_YET_WHOLE, SharedMemory, SlotState, Word

WhenFull = Literal["skip", "wait"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot to fill: `address` of its first byte, `data` its bytes, places as the layout says."""

    index: int
    address: int
    data: memoryview
    layout: Layout

    def view(self, file: str, tensor: str) -> memoryview:
        """A tensor's bytes, writable and flat. Raises KeyError for a name that no file has."""
        place = self.layout.find(file, tensor)
        return self.data[place.offset_bytes : place.end_bytes]


class Slots:
    """Which slot to fill next. `skip`: newest wins; `wait`: a checkpoint that is due is never given up.

    A checkpoint is a slot of each lane, staged one right after the other; it is known by the last one's sequence
    number. Of lanes that go on in turn each slot completes one, together with those right before it.

    A single slot is filled again once its checkpoint was persisted, for which each is due.

    `grouped`: other ranks have the other parts of each checkpoint. The newest that all of them have staged is not given
    up, nor what is newer and may become that.

    `replica`: the first kind of slots has whole checkpoints, and the second what makes the next of the newest.
    """

    def __init__(
        self,
        shared: SharedMemory,
        layouts: Sequence[Layout],
        when_full: WhenFull,
        *,
        grouped: bool = False,
        replica: bool = False,
    ) -> None:
        self._shared = shared
        self._layouts = layouts
        self._when_full = when_full
        self._single = shared.slots == 1
        self._grouped = grouped
        self._replica = replica
        self._agreed = 0  # sequence number of the newest that all ranks have staged
        self._void: set[int] = set()  # newer ones, of which some rank has no part
        self._sequence = 0  # of the last slot that was staged
        self._newest = 0  # of the last checkpoint
        self._is_gone_on_from = False  # of lanes, the next slot completes a checkpoint with those of this one
        self.staged_iteration: int | None = None

    def try_acquire(self, lane: int = 0) -> Slot | None:
        """A slot of a lane to fill, never one of the newest checkpoint unless it is the only one; None if all are
        needed. Raises StoreError where the system does not let it be written.
        """
        with self._shared.locked() as held:
            if not held:
                return None
            words = self._shared.words()
            free = free_slots(words, lane) if self._replica else self._free_slots(words, lane)
            if self._replica and lane == WHOLE and self._when_full == "wait":
                free = spared(words, free)
            index = next(filter(self._shared.pages.ready, free), None)
            if index is None:
                return None
            self._shared.unseal(index)
            self._shared.set_word(index, Word(SlotState.FILLING))
        address = self._shared.address + self._shared.slot_offset(index)
        return Slot(index, address, self._shared.slot_bytes(index), self._layouts[lane])

    def _free_slots(self, words: Sequence[Word], lane: int) -> list[int]:
        """Free ones, then staged ones that nothing needs, the oldest first."""
        needed = self._needed(words)
        usable = (index for index in range(lane, len(words), len(self._layouts)) if self._usable(words[index], needed))
        return sorted(usable, key=lambda index: words[index].sequence)

    def _needed(self, words: Sequence[Word]) -> set[int]:
        """Sequence numbers of slots of what would be restored, or may become that, and of what is due; and of what the
        next checkpoint goes on from, or was staged for it."""
        others = len(self._layouts) - 1
        needed = set(range(max(self._newest, self._sequence - others) + 1, self._sequence + 1))  # none without lanes
        needed.update(range(self._newest - others, self._newest + 1) if self._is_gone_on_from else ())
        for index, word in enumerate(words):
            if word.due or self._counts(index, word):
                needed.update(range(word.sequence - others, word.sequence + 1))
        return needed

    def _counts(self, index: int, word: Word) -> bool:
        """Whether this slot completes what would be restored, or may become that."""
        if self._grouped and self._shared.needs(index) != NOT_YET_WHOLE:
            return word.sequence >= self._agreed and word.sequence not in self._void
        return word.sequence == self._newest

    def _usable(self, word: Word, needed: set[int]) -> bool:
        if word.state is SlotState.FREE:
            return True
        if word.state is not SlotState.STAGED or word.due:
            return False  # stage() passes `due` on to a newer one; what a dead saver left due waits for the next
        return self._single or word.sequence not in needed

    def stage(self, slot: Slot, iteration: int, record: bytes, *, due: bool, whole: bool = True) -> bool:
        """Declare a filled slot staged, the last of a checkpoint if it is `whole` with it, and return whether that is
        due, asked for or not.

        Raises StoreError where memory for the record does not suffice (the slot stays with the caller), or if the slot
        is not being filled.
        """
        if self._shared.word(slot.index).state is not SlotState.FILLING:
            raise StoreError(f"slot {slot.index} is not being filled; acquire a slot for each checkpoint")
        sequence = self._sequence = self._sequence + 1  # never used again, though this is interrupted
        needs = self._needs(slot) if whole else NOT_YET_WHOLE
        self._shared.put_record(slot.index, sequence, iteration, record, needs)
        if not whole:
            self._shared.set_word(slot.index, Word(SlotState.STAGED, sequence))
            self._shared.seal(slot.index)
            return False
        with self._shared.locked() as held:
            given_up = [index for index, word in enumerate(self._shared.words()) if held and self._gives_way(word)]
            due = due or self._single or bool(given_up)
            self._shared.set_word(slot.index, Word(SlotState.STAGED, sequence, due=due))  # seen from here on, whole
            for index in given_up:
                self._shared.set_word(index, Word(SlotState.STAGED, self._shared.word(index).sequence))
        self._newest = sequence
        self._is_gone_on_from = len(self._layouts) > 1
        self.staged_iteration = iteration
        self._shared.seal(slot.index)
        return due

    def _needs(self, slot: Slot) -> int:
        """How many slots that were staged right before it its checkpoint takes, too."""
        if not self._replica:
            return len(self._layouts) - 1
        return NOT_YET_WHOLE if slot.index % KINDS == DELTA else 0

    def _gives_way(self, word: Word) -> bool:
        """Whether a checkpoint that is due is given up for a newer one, which then is due in its place."""
        return (
            self._when_full == "skip"
            and not self._grouped
            and word.state is SlotState.STAGED
            and word.due
            and not word.keep
        )

    def break_off(self) -> None:
        """The next checkpoint takes a slot of each lane, and goes on from none."""
        self._is_gone_on_from = False

    def abandon(self, slot: Slot) -> None:
        """Give back a slot whose filling failed."""
        self._shared.set_word(slot.index, Word(SlotState.FREE))

    def reclaim(self, but: Collection[int]) -> None:
        """Give back all that this process fills but these, by index."""
        for index, word in enumerate(self._words()):
            if word.is_trainers and index not in but:
                self._shared.set_word(index, Word(SlotState.FREE))

    def agree(self, sequence: int, *, due: bool) -> None:
        """All ranks have staged their part of this checkpoint, and have it as due or none of them has.

        Called in another thread than the rest. What is older can be given up.
        """
        with self._shared.locked() as held:
            for index, word in enumerate(self._shared.words()):
                if due and held and word.sequence == sequence and word.state is SlotState.STAGED:
                    self._shared.set_word(index, Word(SlotState.STAGED, sequence, due=True, keep=word.keep))
            self._agreed = max(self._agreed, sequence)
            self._void = {each for each in self._void if each > self._agreed}

    def disown(self, sequence: int) -> None:
        """Some rank has no part of this checkpoint, nor will have. Called in another thread, too."""
        with self._shared.locked():
            self._void.add(sequence)

    @property
    def awaits_replica(self) -> bool:
        """Whether a slot will be free once the replica is an iteration on."""
        return self._replica and bool(deltas_in(self._words()))

    @property
    def awaits_agreement(self) -> bool:
        """Whether a slot will be free once the other ranks have staged their parts, too."""
        return self._grouped and any(
            word.state is SlotState.STAGED and word.sequence > self._agreed and self._counts(index, word)
            for index, word in enumerate(self._shared.words())
        )

    def ask(self, *, keep: bool) -> int | None:
        """Make the newest staged checkpoint due, and return its sequence number; None if none was staged.

        Of several ranks, what all have staged, too: it may be the newest that each of them will have on disk.
        """
        if self._grouped:
            self._ask_agreed()
        with self._shared.locked() as held:
            for index, word in enumerate(self._shared.words()):
                if word.sequence != self._newest or word.state not in (SlotState.STAGED, SlotState.PERSISTING):
                    continue
                if not held:
                    raise StoreError("slots: the saver is stopped in the middle of a change; continue or kill it")
                self._shared.set_word(index, Word(word.state, word.sequence, due=True, keep=word.keep or keep))
                return self._newest
        return None

    def _ask_agreed(self) -> None:
        with self._shared.locked() as held:
            for index, word in enumerate(self._shared.words()):
                durable = word.sequence <= self._shared.durable_sequence
                if held and word.state is SlotState.STAGED and self._counts(index, word) and not durable:
                    self._shared.set_word(index, Word(SlotState.STAGED, word.sequence, due=True, keep=word.keep))

    @property
    def newest_sequence(self) -> int | None:
        """The newest staged checkpoint's; None if none was staged, or its slot, the only one, was taken again."""
        if self._newest and any(word.sequence == self._newest for word in self._words()):
            return self._newest
        return None

    def is_done(self, sequence: int) -> bool:
        """Whether it is durable, and kept if that was asked for: what was durable by then is written once more."""
        keeps = any(word.sequence == sequence and word.keep for word in self._words())
        return self._shared.durable_sequence >= sequence and not keeps

    @property
    def newest_is_void(self) -> bool:
        """Whether some rank has no part of the newest checkpoint that was ever staged, nor will have."""
        return self._newest in self._void

    @property
    def newest_is_durable(self) -> bool:
        """Whether the newest checkpoint that was ever staged is on disk, or none was."""
        return self._shared.durable_sequence >= self._newest

    @property
    def pending(self) -> bool:
        """Whether a staged checkpoint waits to be persisted, or is being."""
        return any(
            word.state is SlotState.PERSISTING or (word.due and word.state is SlotState.STAGED)
            for word in self._words()
        )

    @property
    def most_due(self) -> int | None:
        """How many checkpoints may be due at a time: so many that one slot is left to fill beside the newest that all
        ranks have staged. None where they are waited for."""
        if self._when_full == "wait" or self._single:
            return None
        return max(1, self._shared.slots // len(self._layouts) - 2)

    def _words(self) -> Sequence[Word]:
        """As they are at one moment: a checkpoint may go from one slot to another."""
        with self._shared.locked():
            return self._shared.words()
