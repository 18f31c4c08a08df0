"""Another rank's slots, mirrored: what was received whole is kept as it was received, and written down in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import xxhash

from checkflow.errors import StoreError
from checkflow.store.both.config import SaverConfig
from checkflow.store.both.messages import FailedReport, Message
from checkflow.store.both.mirroring import MAX_CONFIG_BYTES, Answer, Begin, Commit, Hello, blocks_of, hear, say
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.layout import Layout
from checkflow.store.format.manifest import MAX_RECORD_BYTES
from checkflow.store.format.ranks import copy_of
from checkflow.store.format.writer import hash_blocks
from checkflow.store.memory.saver_slots import Taken, give_up, is_whole, take_due, take_last, take_left
from checkflow.store.memory.shared_memory import NOT_YET_WHOLE, SharedMemory, SlotState, Word
from checkflow.store.saver.persister import Persister, Written


class MirroredSlots:
    """Of one rank, and of one configuration of its slots. `receive` and `write_down` may be called in two threads."""

    def __init__(self, hello: Hello, config: bytes) -> None:
        """Raises StoreError where there is no memory for it."""
        self.config = SaverConfig.parse(config)
        self.rank, self.size = hello.rank, hello.size
        self._shared = SharedMemory.create(
            [Layout.of(specs) for specs in self.config.lanes],
            slots=hello.slots,
            record_room_bytes=hello.record_room_bytes,
            config=config,
        )
        while self._shared.pages.wait_for_more():
            pass
        if (refusal := self._shared.pages.take_refusal()) is not None:
            self._shared.close()
            raise StoreError(refusal)
        self._blocks: dict[int, str] = {}  # of the slots that are whole: the hashes that they were received with
        self._lock = threading.Lock()
        self._ended = False
        self.agreed = False  # every rank has staged a checkpoint in slots of this kind

    def receive(self, connection: Connection) -> None:
        """The next slot; the sender hears whether it is here now. Raises OSError where it is gone."""
        begin = hear(connection, Begin)
        record = connection.recv_bytes(MAX_RECORD_BYTES)
        self.agreed |= begin.agreed
        with self._lock:
            if self._ended or begin.slot >= self._shared.slots:
                raise ConnectionAbortedError("nothing more is received")
            self._shared.set_word(begin.slot, Word(SlotState.FILLING))
            self._blocks.pop(begin.slot, None)
        self._shared.unseal(begin.slot)
        data = self._shared.slot_bytes(begin.slot)
        found = []
        for block in blocks_of(data):
            connection.recv_bytes_into(block)
            found.append(xxhash.xxh3_128_hexdigest(block))
        commit, why_not = hear(connection, Commit), ""
        blocks = "".join(found)
        if not commit.whole:
            why_not = "was given up"
        elif (blocks, xxhash.xxh3_128_hexdigest(record)) != (commit.blocks, commit.record):
            why_not = "did not arrive as it was sent"
        else:
            why_not = self._keep(begin, record, blocks)
        if why_not:
            self._shared.set_word(begin.slot, Word(SlotState.FREE))
        say(connection, Answer(why_not=why_not))

    def _keep(self, begin: Begin, record: bytes, blocks: str) -> str:
        try:
            self._shared.put_record(begin.slot, begin.sequence, begin.iteration, record, begin.needs)
        except StoreError as error:
            return str(error)
        with self._lock:
            self._blocks[begin.slot] = blocks
            self._shared.set_word(begin.slot, Word(SlotState.STAGED, begin.sequence))
            if begin.needs != NOT_YET_WHOLE and not is_whole(self._shared, begin.slot):
                return "came without others of its checkpoint's slots"
        self._shared.seal(begin.slot)
        return ""

    def write_down(self, store: Path, report: Callable[[Message], None], *, last_alone: bool = False) -> None:
        """Make all that is whole durable, in a directory of its own in the store. Nothing more is received."""
        with self._lock:
            self._ended = True
        place = copy_of(self.rank, self.size)
        config = replace(self.config, store=store / place)
        persister = Persister(self._shared, config, LocalDisk(), report, place)
        written: list[Written] = []
        for taken in self._last() if last_alone else self._all():
            if not self._is_sound(taken):
                where = f"{store}: the copy of rank {self.rank}'s iteration {taken.iteration}"
                report(FailedReport(sequence=0, message=f"{where} is not what was received, and is not written"))
                give_up(self._shared, taken)  # others may have slots of it
                continue
            place.mkdir(parents=True, exist_ok=True)
            durable = persister.write(taken)
            while durable is None and (again := take_due(self._shared)) is not None:  # until it is given up
                time.sleep(persister.patience.wait_s)
                durable = persister.write(again)
            written += [] if durable is None else [durable]
        persister.settle(written)

    def _all(self) -> Iterator[Taken]:
        """Oldest first."""
        done: set[int] = set()
        while (taken := take_left(self._shared, done)) is not None:
            done.add(taken.sequence)
            yield taken

    def _last(self) -> Iterator[Taken]:
        if (taken := take_last(self._shared)) is not None:
            yield taken

    def _is_sound(self, taken: Taken) -> bool:
        return all(self._blocks.get(slot) == hash_blocks(self._shared.slot_bytes(slot)) for slot in taken.slots)

    def close(self) -> None:
        """Let the memory go."""
        with self._lock:
            self._ended = True
        self._shared.close()


def greeted(connection: Connection) -> MirroredSlots:
    """A rank begins. Raises OSError where it is gone, or there is no memory for its slots: it hears that."""
    hello = hear(connection, Hello)
    config = connection.recv_bytes(MAX_CONFIG_BYTES)
    try:
        made = MirroredSlots(hello, config)
    except (StoreError, ValueError) as error:
        say(connection, Answer(why_not=str(error)))
        raise ConnectionAbortedError(str(error)) from None
    say(connection, Answer())
    return made
