"""The memory that trainer and saver share: one memfd with a control page, the saver's configuration and the slots.

A memfd has no name, so nothing is left behind when its last process ends. docs/store.md draws the bytes.

Every change of state is a single aligned 8-byte store, so a process killed between two stores leaves a valid state.
A reader's decision and its store are made under a POSIX record lock, which the kernel drops when its owner dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate

import xxhash

from checkflow.errors import StoreError
from checkflow.interrupts import held_back
from checkflow.store.format.layout import Layout, padded
from checkflow.store.format.manifest import MAX_RECORD_BYTES
from checkflow.store.format.regular_file import read_at
from checkflow.store.memory.mapping import address_of, map_shared, protect
from checkflow.store.memory.pages import Pages, Span
from checkflow.store.memory.record_overflow import Overflow
from checkflow.store.memory.room import CONTROL_BYTES, Room, head_bytes, is_large, stride
from checkflow.units import format_bytes

MAGIC = int.from_bytes(b"chkflow1", "little")

# Words of the control page
_MAGIC, _SLOTS, _LARGEST_BYTES, _RECORD_ROOM, _CONFIG_BYTES, _DURABLE, _PROGRESS, _LANES, _LANE_BYTES = range(9)
_STEPS, _CONFIRMED = _LANE_BYTES + 2, _LANE_BYTES + 3  # with a replica, whose slots are of two lanes
_FIRST_SLOT, _SLOT_WORDS = 64, 8
_STATE, _ITERATION, _RECORD_BYTES, _RECORD_HASH, _RECORD_AT, _NEEDS = range(6)
_ARRIVALS = _FIRST_SLOT + 7  # the first slot has this word to spare
NOT_YET_WHOLE = 2**32  # of a slot with which no checkpoint is complete


class SlotState(IntEnum):
    """What a slot's bytes are, and who may change them."""

    FREE = 0  # nothing; the trainer may fill it
    FILLING = 1  # being copied to, by the trainer
    STAGED = 2  # a whole checkpoint
    PERSISTING = 3  # a whole checkpoint that the saver reads


@dataclass(frozen=True, slots=True)
class Word:
    """A slot's state word: `sequence` counts staged checkpoints, `due` and `keep` ask the saver for something."""

    state: SlotState
    sequence: int = 0
    due: bool = False
    keep: bool = False

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer fills it: what the process of a replica fills has a sequence number by then."""
        return self.state is SlotState.FILLING and not self.sequence

    def pack(self) -> int:
        return self.sequence << 8 | self.keep << 5 | self.due << 4 | self.state

    @classmethod
    def unpack(cls, value: int) -> Word:
        return cls(SlotState(value & 0xF), value >> 8, bool(value >> 4 & 1), bool(value >> 5 & 1))


class SharedMemory:
    """The mapped buffer. Made by `create` in the trainer, opened by `attach` in the saver."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._bytes = map_shared(fd, size_bytes)
        self.address = address_of(self._bytes)  # the mapping's first byte, for registering it as pinned memory
        self._words = self._bytes[:CONTROL_BYTES].cast("Q")
        self._mutex = threading.Lock()
        self.pages = Pages(fd, self._bytes)  # the slots', in the trainer
        self._overflow = Overflow(fd, self.locked)
        self.pinned = False
        self._sealed: set[int] = set()
        self._seals = True

    @classmethod
    def create(cls, layouts: Sequence[Layout], *, slots: int, record_room_bytes: int, config: bytes) -> SharedMemory:
        """A new buffer with the files' headers in each slot; the slots' pages follow.

        `layouts`: of the slots of each lane in turn; of `slots` there are a multiple of them.

        Raises StoreError where memory does not suffice.
        """
        room = Room.of(layouts, slots=slots, record_room_bytes=record_room_bytes, config_bytes=len(config))
        room.check()
        lanes, largest, head, strides = len(layouts), room.largest_bytes, room.head_bytes, room.strides
        try:
            fd = os.memfd_create("checkflow-slots", os.MFD_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{room.need}: {error.strerror}; allow memfd_create, or free memory") from None
        try:
            os.ftruncate(fd, room.size_bytes)
            shared = cls(fd, room.size_bytes)
            os.posix_fallocate(fd, 0, head)
            shared._bytes[CONTROL_BYTES : CONTROL_BYTES + len(config)] = config
            for word, value in (
                (_SLOTS, slots), (_LARGEST_BYTES, largest), (_RECORD_ROOM, padded(record_room_bytes)),
                (_CONFIG_BYTES, len(config)), (_LANES, lanes),
                *((_LANE_BYTES + lane, layout.size_bytes) for lane, layout in enumerate(layouts)), (_MAGIC, MAGIC),
            ):  # fmt: skip
                shared._words[word] = value
            starts = [shared.slot_offset(slot) for slot in range(slots)]
            for place, header in (
                (start + file.offset_bytes, file.header)
                for slot, start in enumerate(starts)
                for file in layouts[slot % lanes].files
            ):
                os.posix_fallocate(fd, place, len(header))
                shared._bytes[place : place + len(header)] = header
            shared.pages = Pages(
                fd, shared._bytes, [Span(start, strides[slot % lanes]) for slot, start in enumerate(starts)]
            )
        except OSError as error:
            os.close(fd)
            advice = "; allow larger files (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise StoreError(f"slots: {room.need}; the system refuses it ({error.strerror}){advice}") from None
        return shared

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """The buffer of an inherited descriptor. Raises StoreError where it is not one of ours."""
        shared = cls(fd, os.fstat(fd).st_size)
        if shared._words[_MAGIC] != MAGIC:
            raise StoreError("slots: the inherited memory is not checkflow's; start the saver from a trainer only")
        return shared

    def close(self) -> None:
        """Let the memory go, at once or with the last view of a slot."""
        if self.fd < 0:
            return
        self.pages.close()
        os.close(self.fd)
        self.fd = -1
        self._words.release()
        self._bytes.release()

    @property
    def slots(self) -> int:
        return self._words[_SLOTS]

    @property
    def lanes(self) -> int:
        """Slots that make up a checkpoint: slot s is one for lane s modulo this."""
        return self._words[_LANES]

    @property
    def record_room_bytes(self) -> int:
        return self._words[_RECORD_ROOM]

    @property
    def config(self) -> bytes:
        return bytes(self._bytes[CONTROL_BYTES : CONTROL_BYTES + self._words[_CONFIG_BYTES]])

    def slot_offset(self, slot: int) -> int:
        """A slot's first byte, counted from the buffer's."""
        row, lane = divmod(slot, self.lanes)
        return self._first_row + row * self._within_row[-1] + self._within_row[lane]

    @cached_property
    def _first_row(self) -> int:
        return head_bytes(self._words[_LARGEST_BYTES], self._words[_CONFIG_BYTES])

    @cached_property
    def _within_row(self) -> tuple[int, ...]:
        """Where the slot of each lane begins in a row of one of each, and how long the row is."""
        room, largest = self._words[_RECORD_ROOM], self._words[_LARGEST_BYTES]
        strides = (stride(self._words[_LANE_BYTES + lane], room, largest) for lane in range(self.lanes))
        return (0, *accumulate(strides))

    def _files_bytes(self, slot: int) -> int:
        return self._words[_LANE_BYTES + slot % self.lanes]

    def slot_bytes(self, slot: int) -> memoryview:
        """A slot's files, writable."""
        start = self.slot_offset(slot)
        return self._bytes[start : start + self._files_bytes(slot)]

    def seal(self, slot: int) -> None:
        """Let this process only read a slot that is staged: what writes to it by mistake ends, not what was staged.

        Small slots are not sealed, for it takes longer than to fill them; nor pinned ones, which the device may write.
        """
        if self.pinned or not self._seals or not is_large(self._files_bytes(slot)):
            return
        if self._protect(slot, slot + 1, writable=False):
            self._sealed.add(slot)

    def unseal(self, slot: int) -> None:
        """Let this process write a slot again, to fill it.

        Among sealed ones that takes two more mappings. Where the process may have no more, all of them are unsealed at
        once, which takes none, and none is sealed again. Raises StoreError where the system refuses even that.
        """
        if slot not in self._sealed:
            return
        if self._protect(slot, slot + 1, writable=True):
            self._sealed.discard(slot)
            return
        self._seals = False
        if not self._protect(0, self.slots, writable=True):
            raise StoreError("slots: the system refuses to make them writable; raise vm.max_map_count")
        self._sealed.clear()

    def _protect(self, first: int, end: int, *, writable: bool) -> bool:
        start = self.slot_offset(first)
        return protect(self.address + start, self.slot_offset(end) - start, writable=writable)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """In the trainer: the inside takes memory, which slots get afterwards, and brings checkpoints to the store of
        which the saver does not know."""
        self._words[_ARRIVALS] += 1
        try:
            with self.pages.paused():
                yield
        finally:
            self._words[_ARRIVALS] += 1

    # State. Whoever writes a word owns it: see docs/store.md, section "Slots".

    def word(self, slot: int) -> Word:
        return Word.unpack(self._words[_FIRST_SLOT + slot * _SLOT_WORDS + _STATE])

    def set_word(self, slot: int, word: Word) -> None:
        self._words[_FIRST_SLOT + slot * _SLOT_WORDS + _STATE] = word.pack()

    def words(self) -> tuple[Word, ...]:
        return tuple(self.word(slot) for slot in range(self.slots))

    @property
    def arrivals(self) -> int:
        """How often the store may have got checkpoints that the saver did not write. Written by the trainer only."""
        return self._words[_ARRIVALS]

    @property
    def durable_sequence(self) -> int:
        """The newest sequence that the saver made durable; 0 before the first. Written by the saver only."""
        return self._words[_DURABLE]

    @durable_sequence.setter
    def durable_sequence(self, sequence: int) -> None:
        self._words[_DURABLE] = sequence

    @property
    def progress(self) -> int:
        """Counts the saver's finished pieces of work, so that a saver that hangs can be told from a slow one."""
        return self._words[_PROGRESS]

    def advance(self) -> None:
        self._words[_PROGRESS] += 1

    @property
    def steps(self) -> int:
        """How often the replica was brought on. Written by the process that does it only."""
        return self._words[_STEPS]

    @steps.setter
    def steps(self, count: int) -> None:
        self._words[_STEPS] = count

    @property
    def confirmed(self) -> int:
        """The newest sequence number that the replica has as the training said it had it; 0 before the first."""
        return self._words[_CONFIRMED]

    @confirmed.setter
    def confirmed(self, sequence: int) -> None:
        self._words[_CONFIRMED] = sequence

    # The commit record, which lies behind the slot's files, or behind all slots where that room does not suffice.

    def needs(self, slot: int) -> int:
        """How many slots staged right before it its checkpoint takes, or NOT_YET_WHOLE."""
        return self._words[_FIRST_SLOT + slot * _SLOT_WORDS + _NEEDS]

    def put_record(self, slot: int, sequence: int, iteration: int, record: bytes, needs: int = 0) -> None:
        """Write the record of a slot being filled. Raises StoreError where memory does not suffice."""
        if len(record) > MAX_RECORD_BYTES:
            most = format_bytes(MAX_RECORD_BYTES)
            raise StoreError(
                f"commit record: {format_bytes(len(record))} are more than a checkpoint can have beside its tensors, "
                f"{most}; put less into metadata= and what else is attached"
            )
        base = _FIRST_SLOT + slot * _SLOT_WORDS
        at = 0
        if len(record) > self.record_room_bytes:
            at = self._overflow.put(slot, record)
        else:
            start = self.slot_offset(slot) + self._files_bytes(slot)
            self._bytes[start : start + len(record)] = record
        self._words[base + _RECORD_AT] = at
        self._words[base + _ITERATION] = iteration
        self._words[base + _RECORD_BYTES] = len(record)
        self._words[base + _NEEDS] = needs
        self._words[base + _RECORD_HASH] = _record_hash(sequence, iteration, needs, record)

    def record(self, slot: int) -> tuple[int, bytes] | None:
        """A staged slot's iteration and record; None where they are not what was staged."""
        base = _FIRST_SLOT + slot * _SLOT_WORDS
        iteration, length = self._words[base + _ITERATION], self._words[base + _RECORD_BYTES]
        if length > os.fstat(self.fd).st_size:
            return None
        start = self._words[base + _RECORD_AT] or self.slot_offset(slot) + self._files_bytes(slot)
        record = read_at(self.fd, start, length)
        found = _record_hash(self.word(slot).sequence, iteration, self.needs(slot), record)
        whole = found == self._words[base + _RECORD_HASH]
        return (iteration, record) if whole else None

    @contextlib.contextmanager
    def locked(self, timeout_s: float = 1.0) -> Iterator[bool]:
        """Exclude the other process for a few stores; False if it keeps the lock (it is stopped) for too long.

        An interrupt waits until they are done: who was interrupted on the way in would keep the lock.
        """
        with held_back(sigterm=True), self._mutex:
            held = _lock(self.fd, timeout_s)
            try:
                yield held
            finally:
                if held:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN)


def _record_hash(sequence: int, iteration: int, needs: int, record: bytes) -> int:
    hasher = xxhash.xxh3_64()
    hasher.update(f"{sequence} {iteration} {needs} {len(record)} ".encode())
    hasher.update(record)
    return hasher.intdigest()


def _lock(fd: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(50e-6)
