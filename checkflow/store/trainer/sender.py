"""Sends what is staged to its mirror, in a thread of its own: nobody waits for it.

A slot stays as it is meanwhile, for the other ranks hear that it is staged only once the mirror has it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError

import xxhash

from checkflow.store.both.connections import Patient, connected
from checkflow.store.both.mirroring import Answer, Begin, Commit, Hello, blocks_of, hear, say
from checkflow.store.memory.room import MAX_SLOTS
from checkflow.store.memory.shared_memory import NOT_YET_WHOLE, SharedMemory, SlotState
from checkflow.store.trainer.mirror_process import MirrorAddress

TRIES = 2  # of one checkpoint, which may arrive otherwise than it was sent
CLOSE_S = 5.0  # for a mirror that does not answer
READY_S = 600.0  # for one to have its memory
ANSWER_S = 120.0  # for it to take a block, and to answer; until then every checkpoint waits


@dataclass(frozen=True, slots=True)
class MirrorTarget:
    """Whose mirror a rank's slots have, and who that rank is."""

    rank: int
    size: int
    mirror_rank: int
    address: MirrorAddress


@dataclass(frozen=True, slots=True)
class Sent:
    """A checkpoint that the mirror has, whole: of several slots, what of it the mirror had not had before."""

    iteration: int
    size_bytes: int
    send_ns: int


@dataclass(frozen=True, slots=True)
class _Staged:
    slot: int
    sequence: int
    iteration: int
    then: Callable[[], None] | None


class Sender:
    """Of one handle's slots, in the order in which they were staged. `sent` and `trouble`: for whoever tells of it."""

    def __init__(self, shared: SharedMemory, target: MirrorTarget) -> None:
        self.sent: deque[Sent] = deque()
        self.trouble: deque[str] = deque()
        self._shared = shared
        self.target = target
        self._staged: queue.SimpleQueue[_Staged | None] = queue.SimpleQueue()
        self._connection: Patient | None = None
        self._broken = self._closing = False
        self._parts_bytes = self._parts_ns = 0  # of what was sent of the next checkpoint, which is not whole yet
        self._there: deque[int] = deque(maxlen=MAX_SLOTS)  # sequence numbers of what the mirror has had
        self._asked = self._done = 0  # counted in one thread each
        self.agreed = False  # every rank has staged its part of a checkpoint in these slots
        self._thread = threading.Thread(target=self._run, name="checkflow-mirror", daemon=True)
        self._thread.start()

    def send(self, slot: int, sequence: int, iteration: int, then: Callable[[], None] | None) -> None:
        """A slot was staged; `then` is called in the thread once the mirror has it, or will never have it. None: its
        checkpoint is not whole with it."""
        self._asked += 1
        self._staged.put(_Staged(slot, sequence, iteration, then))

    @property
    def pending(self) -> bool:
        """Whether the mirror has not yet all that was staged, and may still get it."""
        return self._done < self._asked

    def close(self) -> None:
        """Send nothing more; the slots are not touched any more."""
        self._closing = True
        self._staged.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() and self._connection is not None:
            with contextlib.suppress(OSError):  # it has closed it meanwhile
                self._connection.hang_up()
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (staged := self._staged.get()) is not None and not self._closing:
            try:
                if not self._broken:
                    self._send(staged)
            except Exception as error:  # noqa: BLE001 (nobody else would hear of it)
                self._broken = True
                if not self._closing:
                    self.trouble.append(
                        f"replicate: rank {self.target.mirror_rank} holds no copies of this rank's checkpoints any "
                        f"more ({_why(error)}); a lost machine now costs what is not on disk"
                    )
            if staged.then is not None:
                staged.then()
            self._done += 1
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()

    def _send(self, staged: _Staged) -> None:
        connection = self._connected()
        why_not = ""
        for _ in range(TRIES):
            started = time.monotonic_ns()
            record = self._shared.record(staged.slot)
            if record is None or not self._holds(staged):
                return  # given up meanwhile
            needs = self._needs(staged)
            begin = Begin(
                slot=staged.slot,
                sequence=staged.sequence,
                iteration=staged.iteration,
                needs=needs,
                agreed=self.agreed,
            )
            say(connection, begin)
            connection.send_bytes(record[1])
            data, hashes = self._shared.slot_bytes(staged.slot), []
            for block in blocks_of(data):
                hashes.append(xxhash.xxh3_128_hexdigest(block))
                connection.send_bytes(block)
            whole = self._holds(staged)
            said = Commit(whole=whole, blocks="".join(hashes), record=xxhash.xxh3_128_hexdigest(record[1]))
            say(connection, said)
            why_not = hear(connection, Answer).why_not
            if not why_not:
                self._there.append(staged.sequence)
                size_bytes = len(data) + len(record[1])
                self._count(staged, size_bytes, time.monotonic_ns() - started, whole=needs != NOT_YET_WHOLE)
            if not why_not or not whole:
                return
        raise ConnectionAbortedError(why_not)

    def _needs(self, staged: _Staged) -> int:
        """As it was staged; but where a slot that it needs was filled again before it was sent, its checkpoint lacks
        some rank's part and cannot count, and need not be whole there."""
        needs = self._shared.needs(staged.slot)
        others = () if needs == NOT_YET_WHOLE else range(staged.sequence - needs, staged.sequence)
        return needs if all(sequence in self._there for sequence in others) else NOT_YET_WHOLE

    def _count(self, staged: _Staged, size_bytes: int, send_ns: int, *, whole: bool) -> None:
        self._parts_bytes += size_bytes
        self._parts_ns += send_ns
        if whole:
            self.sent.append(Sent(staged.iteration, self._parts_bytes, self._parts_ns))
            self._parts_bytes = self._parts_ns = 0

    def _holds(self, staged: _Staged) -> bool:
        word = self._shared.word(staged.slot)
        return word.sequence == staged.sequence and word.state in (SlotState.STAGED, SlotState.PERSISTING)

    def _connected(self) -> Patient:
        if self._connection is None:
            address, target = self.target.address, self.target
            connection = connected(address.host, address.port, address.key, ANSWER_S)
            self._connection = connection
            connection.wait_for(READY_S)
            said = Hello(
                rank=target.rank,
                size=target.size,
                slots=self._shared.slots,
                record_room_bytes=self._shared.record_room_bytes,
            )
            say(connection, said)
            connection.send_bytes(self._shared.config)
            if why_not := hear(connection, Answer).why_not:
                raise ConnectionAbortedError(why_not)
            connection.wait_for(ANSWER_S)
        return self._connection


def _why(error: Exception) -> str:
    if isinstance(error, AuthenticationError):
        return "it does not know the key"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
