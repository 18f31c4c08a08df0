"""Slots of a replica: whole ones, and those of what brings the newest an iteration on.

A slot of the first kind has all of the state as it was after an iteration. One of the second is a *delta*: gradients of
the next iteration, what no gradient rebuilds, and that checkpoint's record. The trainer fills deltas and, to begin
with, a whole slot. A process beside the saver makes the next whole one of the newest and the delta after it, and then
the delta's slot is free. A delta that was staged so survives a killed trainer, for these processes outlive it.

The delta with sequence number n goes on from the whole slot with n - 1, and makes the one with n.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from checkflow.store.format.layout import Layout, PlacedTensor
from checkflow.store.memory.shared_memory import SharedMemory, SlotState, Word

WHOLE, DELTA = 0, 1
KINDS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration on: which slots."""

    sequence: int
    base: int
    delta: int
    into: int


def only_in_whole(layouts: Sequence[Layout]) -> list[tuple[str, PlacedTensor]]:
    """What deltas rebuild: tensors, each after its file's name, that only whole slots have."""
    others = {(file.name, tensor.spec.name) for file in layouts[DELTA].files for tensor in file.tensors}
    return [
        (file.name, tensor)
        for file in layouts[WHOLE].files
        for tensor in file.tensors
        if (file.name, tensor.spec.name) not in others
    ]


def digest(parts: Iterable[memoryview]) -> str:
    """Of what `only_in_whole` lists, as it lies in a whole slot: trainer and replica tell each other by it."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def free_slots(words: Sequence[Word], kind: int) -> list[int]:
    """Those of a kind that may be filled, the longest unused first: what is free, or staged and needed by nothing.

    The newest whole one is needed, what is due, deltas that lead to something newer, and what these go on from.
    """
    newest = newest_whole(words)
    wanted = {words[index].sequence for index in _deltas(words) if _is_wanted(words, words[index])}
    needed = wanted if kind == DELTA else {newest} | {sequence - 1 for sequence in wanted}
    usable = (
        index
        for index in range(kind, len(words), KINDS)
        if words[index].state is SlotState.FREE
        or (words[index].state is SlotState.STAGED and not words[index].due and words[index].sequence not in needed)
    )
    return sorted(usable, key=lambda index: words[index].sequence)


def spared(words: Sequence[Word], free: list[int]) -> list[int]:
    """Of free whole slots those that leave one for what is made of deltas that are due."""
    is_due = any(words[index].due for index in _deltas(words))
    is_made = any(_is_made(words[index]) for index in range(WHOLE, len(words), KINDS))
    return free[1:] if is_due and not is_made else free


def newest_whole(words: Sequence[Word]) -> int:
    """The sequence number of the newest whole slot; 0 where there is none."""
    return max(_wholes(words), default=0)


def deltas_in(words: Sequence[Word]) -> list[Word]:
    """What was staged and is in no whole slot yet, the oldest first."""
    return [words[index] for index in _deltas(words)]


def hold(shared: SharedMemory) -> int:
    """A descriptor that is locked for as long as any process has it open: by this others see that one is there.

    Within `locked`, since closing any descriptor of the memory gives up its other locks.
    """
    fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    return fd


def is_held(shared: SharedMemory) -> bool:
    """Whether a process is there that brings the replica on."""
    with shared.locked():
        try:
            os.close(hold(shared))
        except BlockingIOError:
            return True
        return False


def clear_unfinished(shared: SharedMemory) -> None:
    """What a process that died was making is nobody's."""
    with shared.locked(timeout_s=60.0):
        for index, word in enumerate(shared.words()):
            if index % KINDS == WHOLE and _is_made(word):
                shared.set_word(index, Word(SlotState.FREE))


def forget_trainer(shared: SharedMemory) -> None:
    """It is dead: what it was filling is nobody's."""
    with shared.locked(timeout_s=60.0):
        for index, word in enumerate(shared.words()):
            if word.is_trainers:
                shared.set_word(index, Word(SlotState.FREE))


def next_step(shared: SharedMemory) -> Step | None:
    """The oldest delta, the whole slot before it and one to fill; None where there is none, or no slot is free.

    Deltas that lead to nothing are given up: those from before a newer whole slot, and those without a base; also where
    no slot will be free, for a newer whole one is due, which is written after them.
    """
    with shared.locked(timeout_s=60.0) as held:
        while held:
            words = shared.words()
            delta = next(iter(_deltas(words)), None)
            if delta is None:
                return None
            step = _step(words, delta)
            if step is not None:
                shared.set_word(step.into, Word(SlotState.FILLING, step.sequence))
                return step
            if _leads_on(words, delta) and not _is_late(words, delta):
                return None
            _give_up(shared, delta)
        return None


def can_step(words: Sequence[Word]) -> bool:
    """Whether the process that brings the replica on has something to do, or is doing it."""
    deltas = _deltas(words)
    return bool(deltas) and (_step(words, deltas[0]) is not None or not _leads_on(words, deltas[0]))


def made(shared: SharedMemory, step: Step, iteration: int, record: bytes) -> None:
    """The step is done: its slot has all of the state. Raises StoreError where the record finds no memory."""
    shared.put_record(step.into, step.sequence, iteration, record)
    with shared.locked(timeout_s=60.0):
        word = shared.word(step.delta)
        shared.set_word(step.into, Word(SlotState.STAGED, step.sequence, due=word.due, keep=word.keep))
        shared.set_word(step.delta, Word(SlotState.FREE))
    shared.steps += 1


def give_up_deltas(shared: SharedMemory) -> list[Word]:
    """Nobody will make anything of them, nor of what was being made. Returns what they were, the oldest first."""
    with shared.locked(timeout_s=60.0):
        words = shared.words()
        for index, word in enumerate(words):
            if (index % KINDS == DELTA and word.state is SlotState.STAGED) or _is_made(word):
                shared.set_word(index, Word(SlotState.FREE))
        return deltas_in(words)


def _step(words: Sequence[Word], delta: int) -> Step | None:
    """What can be made of a delta, if a slot is free or being filled with it."""
    sequence, wholes = words[delta].sequence, _wholes(words)
    if not _leads_on(words, delta):
        return None
    doing = [index for index in range(WHOLE, len(words), KINDS) if _is_made(words[index])]
    free = doing or free_slots(words, WHOLE)
    return Step(sequence, wholes[sequence - 1], delta, free[0]) if free else None


def _leads_on(words: Sequence[Word], delta: int) -> bool:
    """Whether the next whole slot is to be made of it."""
    sequence, wholes = words[delta].sequence, _wholes(words)
    return sequence not in wholes and sequence - 1 in wholes and _is_wanted(words, words[delta])


def _is_late(words: Sequence[Word], delta: int) -> bool:
    """Whether something newer than it is whole, and due: that is not written before it, and so no slot is freed."""
    wholes = [words[index] for index in _wholes(words).values()]
    return any(word.due and word.sequence > words[delta].sequence for word in wholes)


def _is_wanted(words: Sequence[Word], delta: Word) -> bool:
    """Whether it leads to something newer than there is, is asked for, or is being worked at."""
    worked_at = (words[index].sequence for index in range(WHOLE, len(words), KINDS) if _is_made(words[index]))
    return delta.due or delta.sequence > newest_whole(words) or delta.sequence in worked_at


def _is_made(word: Word) -> bool:
    return word.state is SlotState.FILLING and not word.is_trainers


def _give_up(shared: SharedMemory, delta: int) -> None:
    """What is asked of it is asked of the newest whole slot, which is the same or a newer one."""
    words = shared.words()
    word, newest = words[delta], _wholes(words).get(newest_whole(words))
    if word.due and newest is not None:
        other = words[newest]
        shared.set_word(newest, Word(other.state, other.sequence, due=True, keep=other.keep or word.keep))
    shared.set_word(delta, Word(SlotState.FREE))


def _deltas(words: Sequence[Word]) -> list[int]:
    """Slots of staged deltas, the oldest first."""
    staged = (index for index in range(DELTA, len(words), KINDS) if words[index].state is SlotState.STAGED)
    return sorted(staged, key=lambda index: words[index].sequence)


def _wholes(words: Sequence[Word]) -> dict[int, int]:
    """Whole slots by sequence number."""
    there = (SlotState.STAGED, SlotState.PERSISTING)
    return {words[i].sequence: i for i in range(WHOLE, len(words), KINDS) if words[i].state in there}
