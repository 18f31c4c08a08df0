"""The saver's side of the slots: take a staged checkpoint, give it back.

A checkpoint is the slot that completed it and those that were staged right before, one of each lane. The trainer fills
none of them while it is the newest, due or being persisted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from checkflow.store.memory.shared_memory import NOT_YET_WHOLE, SharedMemory, SlotState, Word


@dataclass(frozen=True, slots=True)
class Taken:
    """A staged checkpoint that the saver reads; `record` is None where the memory does not hold what was staged."""

    slots: tuple[int, ...]  # in the order in which they were staged; the last one completed it
    sequence: int
    iteration: int
    record: bytes | None
    keep: bool

    @property
    def index(self) -> int:
        """The slot that stands for it."""
        return self.slots[-1]


def recover(shared: SharedMemory) -> None:
    """Put back what a predecessor was persisting when it died."""
    with shared.locked(timeout_s=60.0):
        words = shared.words()
        found = {index: word for index, word in enumerate(words) if word.state is SlotState.PERSISTING}
        last = max((word.sequence for word in found.values()), default=0)
        for index, word in found.items():
            due = word.due or word.sequence == last
            shared.set_word(index, Word(SlotState.STAGED, word.sequence, due=due, keep=word.keep))


def take_due(shared: SharedMemory) -> Taken | None:
    """The oldest checkpoint that is due; None if none is, or it is not whole yet: what is newer comes after it."""
    with shared.locked(timeout_s=60.0) as held:
        due = [(word.sequence, index) for index, word in enumerate(shared.words()) if word.due and _staged(word)]
        if not held or not due or shared.needs(min(due)[1]) == NOT_YET_WHOLE:
            return None
        return _take(shared, min(due)[1])


def take_last(shared: SharedMemory) -> Taken | None:
    """The newest staged checkpoint unless it is durable: what a dead trainer left."""
    with shared.locked(timeout_s=60.0) as held:
        words = shared.words()
        complete = [
            (word.sequence, index)
            for index, word in enumerate(words)
            if _staged(word) and _slots_of(shared, words, index) is not None
        ]
        if not held or not complete or max(complete)[0] <= shared.durable_sequence:
            return None
        return _take(shared, max(complete)[1])


def take_left(shared: SharedMemory, done: Collection[int]) -> Taken | None:
    """The oldest staged checkpoint whose sequence number is not among these: of several ranks' dead trainers each
    leaves all it has, for which of them every rank has is not known."""
    with shared.locked(timeout_s=60.0) as held:
        words = shared.words()
        left = [
            (word.sequence, index)
            for index, word in enumerate(words)
            if _staged(word) and word.sequence not in done and _slots_of(shared, words, index) is not None
        ]
        return _take(shared, min(left)[1]) if held and left else None


def is_whole(shared: SharedMemory, index: int) -> bool:
    """Whether a staged slot completes a checkpoint whose other slots are all there."""
    return _slots_of(shared, shared.words(), index) is not None


def give_back(shared: SharedMemory, taken: Taken) -> None:
    """The slots are the trainer's again, their checkpoint on disk."""
    with shared.locked(timeout_s=60.0):
        _put(shared, taken, due=False)
        shared.durable_sequence = max(shared.durable_sequence, taken.sequence)  # told once the slot can be had


def give_up(shared: SharedMemory, taken: Taken) -> None:
    """The slots are the trainer's again; their checkpoint could not be made durable, and is tried again if it was asked
    for meanwhile.
    """
    with shared.locked(timeout_s=60.0):
        _put(shared, taken, due=shared.word(taken.index).due)


def put_off(shared: SharedMemory, taken: Taken, *, newest_wins: bool) -> None:
    """Its checkpoint is tried again later, or the newest in its place."""
    with shared.locked(timeout_s=60.0):
        words = shared.words()
        newer = [
            index
            for index, word in enumerate(words)
            if _staged(word) and word.sequence > taken.sequence and _slots_of(shared, words, index) is not None
        ]
        gives_way = newest_wins and bool(newer) and not shared.word(taken.index).keep
        _put(shared, taken, due=not gives_way)
        if gives_way:
            index = max(newer, key=lambda index: words[index].sequence)
            shared.set_word(index, Word(SlotState.STAGED, words[index].sequence, due=True, keep=words[index].keep))


def _put(shared: SharedMemory, taken: Taken, *, due: bool) -> None:
    for index in taken.slots[:-1]:
        word = shared.word(index)
        shared.set_word(index, Word(SlotState.STAGED, word.sequence, due=word.due, keep=word.keep))
    word = shared.word(taken.index)
    asked_again = word.keep and not taken.keep  # the trainer asked to keep it while it was being written
    keep = asked_again or (due and word.keep)
    shared.set_word(taken.index, Word(SlotState.STAGED, word.sequence, due=due or asked_again, keep=keep))


def _staged(word: Word) -> bool:
    return word.state is SlotState.STAGED


def _slots_of(shared: SharedMemory, words: Sequence[Word], index: int) -> tuple[int, ...] | None:
    """The slots of the checkpoint that one completes; None where it completes none, or one of them has other bytes."""
    needs, last = shared.needs(index), words[index].sequence
    if needs == NOT_YET_WHOLE or needs >= shared.lanes:
        return None
    by_sequence = {word.sequence: other for other, word in enumerate(words) if _staged(word)}
    slots = tuple(by_sequence.get(sequence, -1) for sequence in range(last - needs, last + 1))
    if -1 in slots or (needs and any(shared.record(other) is None for other in slots)):
        return None
    return slots


def _take(shared: SharedMemory, index: int) -> Taken:
    words = shared.words()
    slots = _slots_of(shared, words, index)
    word = words[index]
    shared.set_word(index, Word(SlotState.PERSISTING, word.sequence, keep=word.keep))  # due once it is asked for again
    for other in (slots or (index,))[:-1]:
        shared.set_word(
            other, Word(SlotState.PERSISTING, words[other].sequence, due=words[other].due, keep=words[other].keep)
        )
    found = shared.record(index) if slots is not None else None
    iteration, record = found if found is not None else (0, None)
    return Taken(slots or (index,), word.sequence, iteration, record, word.keep)
