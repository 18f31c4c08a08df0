"""The saver's side of the slots: take a staged checkpoint, give it back."""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.store.memory.shared_memory import SharedMemory, SlotState, Word


@dataclass(frozen=True, slots=True)
class Taken:
    """A staged checkpoint that the saver reads; `record` is None where the memory does not hold what was staged."""

    index: int
    sequence: int
    iteration: int
    record: bytes | None
    keep: bool


def recover(shared: SharedMemory) -> None:
    """Put back what a predecessor was persisting when it died."""
    with shared.locked(timeout_s=60.0):
        for index, word in enumerate(shared.words()):
            if word.state is SlotState.PERSISTING:
                shared.set_word(index, Word(SlotState.STAGED, word.sequence, due=True, keep=word.keep))


def take_due(shared: SharedMemory) -> Taken | None:
    """The oldest checkpoint that is due; None if none is."""
    with shared.locked(timeout_s=60.0) as held:
        due = [(word.sequence, index) for index, word in enumerate(shared.words()) if word.due and _staged(word)]
        return _take(shared, min(due)[1]) if held and due else None


def take_last(shared: SharedMemory) -> Taken | None:
    """The newest staged checkpoint unless it is durable: what a dead trainer left."""
    with shared.locked(timeout_s=60.0) as held:
        staged = [(word.sequence, index) for index, word in enumerate(shared.words()) if _staged(word)]
        if not held or not staged or max(staged)[0] <= shared.durable_sequence:
            return None
        return _take(shared, max(staged)[1])


def give_back(shared: SharedMemory, taken: Taken) -> None:
    """The slot is the trainer's again, its checkpoint on disk."""
    with shared.locked(timeout_s=60.0):
        _put(shared, taken, due=False)
        shared.durable_sequence = max(shared.durable_sequence, taken.sequence)  # told once the slot can be had


def give_up(shared: SharedMemory, taken: Taken) -> None:
    """The slot is the trainer's again; its checkpoint could not be made durable, and is tried again if it was asked for
    meanwhile.
    """
    with shared.locked(timeout_s=60.0):
        _put(shared, taken, due=shared.word(taken.index).due)


def put_off(shared: SharedMemory, taken: Taken, *, newest_wins: bool) -> None:
    """Its checkpoint is tried again later, or the newest in its place."""
    with shared.locked(timeout_s=60.0):
        words = shared.words()
        newer = [index for index, word in enumerate(words) if _staged(word) and word.sequence > taken.sequence]
        gives_way = newest_wins and bool(newer) and not shared.word(taken.index).keep
        _put(shared, taken, due=not gives_way)
        if gives_way:
            index = max(newer, key=lambda index: words[index].sequence)
            shared.set_word(index, Word(SlotState.STAGED, words[index].sequence, due=True, keep=words[index].keep))


def _put(shared: SharedMemory, taken: Taken, *, due: bool) -> None:
    word = shared.word(taken.index)
    asked_again = word.keep and not taken.keep  # the trainer asked to keep it while it was being written
    keep = asked_again or (due and word.keep)
    shared.set_word(taken.index, Word(SlotState.STAGED, word.sequence, due=due or asked_again, keep=keep))


def _staged(word: Word) -> bool:
    return word.state is SlotState.STAGED


def _take(shared: SharedMemory, index: int) -> Taken:
    word = shared.word(index)
    shared.set_word(index, Word(SlotState.PERSISTING, word.sequence, keep=word.keep))  # due once it is asked for again
    found = shared.record(index)
    iteration, record = found if found is not None else (0, None)
    return Taken(index, word.sequence, iteration, record, word.keep)
