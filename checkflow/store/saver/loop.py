"""The saver's loop: persist what is due; when the trainer is gone, persist the newest staged checkpoint and end.

Of a job of several processes each saver persists all that is staged then, for a part counts only where every rank has
its own.

What the disk refuses is tried again, for as long as it is told to: with the trainer dead nobody else has it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from checkflow.background import give_way
from checkflow.errors import internal, reason
from checkflow.store.both.config import SaverConfig
from checkflow.store.both.messages import FailedReport, Message, Notice, encode, send
from checkflow.store.both.saver_log import write_log
from checkflow.store.both.words import AGREED, CLOSE, LAST, MAX_WORD_BYTES, NOW, RESTORED, number_in
from checkflow.store.format.disk import Disk, LocalDisk
from checkflow.store.memory.saver_slots import Taken, recover, take_due, take_last, take_left
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.saver.awaited import Awaited
from checkflow.store.saver.held_store import HeldStore
from checkflow.store.saver.persister import Persister, Written
from checkflow.store.saver.settler import Settler
from checkflow.store.saver.trouble import advice

LOOK_MS = 20  # how often to look after what is settled in the background, where nothing else wakes the saver
BREATH_S = 1.0  # how often to show that one waits and does not hang


def work(memory: int, end: int, directory: int, lock: int, trainer: int, heard: Sequence[bytes]) -> None:
    """A saver's, on these descriptors. `heard`: what the trainer has said before."""
    give_way()
    os.fchdir(directory)  # what was locked is what is written, wherever its path leads by now
    shared, here = SharedMemory.attach(memory), Path()
    saver = Saver(shared, LocalDisk(), socket.socket(fileno=end), trainer, here, directory, lock, heard)
    try:
        saver.run()
    except Exception as error:
        saver.fail(f"the saver ended on an {internal(error)}")
        raise


class Saver:
    """Runs until the trainer closes or dies. `trainer` is a pidfd of it, `store` a path to the held directory."""

    def __init__(
        self, shared: SharedMemory, disk: Disk, end: socket.socket, trainer: int, store: Path, directory_fd: int,
        lock_fd: int, heard: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        """`heard`: what the trainer has said before."""
        self._shared = shared
        self._config = SaverConfig.parse(shared.config)
        self._end = end
        self._trainer = trainer
        self._directory_fd = directory_fd
        self._hold = HeldStore(self._config.store, directory_fd, lock_fd)
        self._outbox: deque[Message] = deque()
        self._last = self._closing = self._orphan = self._last_tried = False
        self._taken: set[int] = set()  # sequence numbers
        self._persister = Persister(shared, self._config, disk, self._report, store, self._look)
        self._patience = self._persister.patience
        self._settler = Settler(self._settle)
        self._sending = threading.Lock()  # reports come from the settler's thread too
        self._looking = threading.Lock()
        self._awaited = Awaited(shared, self._config.store, self._report)
        self._told: deque[FailedReport] = deque(maxlen=100)  # sent, maybe to a trainer that died before it listened
        for packet in heard:
            self._obey(packet)

    def run(self) -> None:
        """Until the trainer is gone and all that can be durable is."""
        recover(self._shared)
        try:
            self._look()
            self._persister.remove_leftovers()
        except OSError as error:
            self._tell(f"leftovers cannot be removed ({reason(error)}); {advice(error)}")
        while self._next():
            pass

    def fail(self, message: str) -> None:
        """Report the saver's own end."""
        self._settler.close()
        self._report(FailedReport(sequence=0, message=message))
        if self._orphan:
            self._log()

    def _next(self) -> bool:
        """Do one thing; False at the end."""
        self._listen(0)
        in_a_hurry = self._patience.exhausted and (self._orphan or self._closing)  # one last try of each, and an end
        waits_s = 0.0 if in_a_hurry else self._patience.wait_s
        taken = None if waits_s else take_due(self._shared)
        awaits = taken is None and self._awaits()
        if taken is None and not waits_s and self._orphan and not self._last_tried and not awaits:
            taken = self._left()  # what fails then is due, until patience is exhausted
            self._last_tried = taken is None or not self._config.grouped
        if taken is not None:
            self._persist(taken)
            return True
        if self._settler.busy:
            if self._orphan:
                self._settler.wait()
            else:
                self._settler.tend(now=self._closing)
                self._listen(LOOK_MS)
            return True
        if waits_s and any(word.due for word in self._shared.words()):
            self._breathe(waits_s)
            return True
        if awaits:
            self._look_again()
            return True
        if self._orphan:
            self._log()
            return False
        if self._closing and not self._outbox:
            return False
        self._listen(None)
        return True

    def _awaits(self) -> bool:
        """Whether something staged is to become what can be written, by another process."""
        if not self._config.replica:
            return False
        return self._awaited.any_left() if self._orphan else self._awaited.any_due()

    def _look_again(self) -> None:
        self._shared.advance()  # who waits for another process does not hang
        if self._orphan:
            time.sleep(LOOK_MS / 1000)
        else:
            self._listen(LOOK_MS)

    def _left(self) -> Taken | None:
        """What a dead trainer left."""
        return take_left(self._shared, self._taken) if self._config.grouped else take_last(self._shared)

    def _persist(self, taken: Taken) -> None:
        self._taken = {taken.sequence} | (self._taken & {word.sequence for word in self._shared.words()})
        busy = self._settler.busy  # what is settled meanwhile makes room just as what is waited for
        written = self._persister.write(taken, lambda: self._settler.wait() or busy)
        self._listen(0)
        if written is not None:
            self._settler.add(written)

    def _breathe(self, waits_s: float) -> None:
        self._shared.advance()
        if self._orphan:
            time.sleep(min(waits_s, BREATH_S))
        else:
            self._listen(math.ceil(1000 * min(waits_s, BREATH_S)))

    def _look(self) -> None:
        with self._looking:
            self._hold.look(self._tell, trainer_lives=not self._orphan)

    def _tell(self, message: str) -> None:
        self._report(Notice(message=f"{self._config.store}: {message}"))

    def _settle(self, group: Sequence[Written]) -> None:
        """Once nobody trains there is memory to leave the checkpoint in, where the next trainer finds it."""
        self._persister.settle(group, to_cache=self._orphan or self._last)

    def _listen(self, timeout_ms: int | None) -> None:
        """Wait for the trainer's word or end."""
        self._flush()
        poll = select.poll()
        poll.register(self._trainer, select.POLLIN)
        poll.register(self._end, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        for fd, events in poll.poll(timeout_ms):
            if fd == self._trainer:
                self._be_alone()
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._hear()
        self._flush()

    def _hear(self) -> None:
        while True:
            try:
                packet = self._end.recv(MAX_WORD_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            self._obey(packet)
            if not packet:
                return

    def _obey(self, packet: bytes) -> None:
        """A word; an empty one is the end of the trainer's socket."""
        if not packet:
            self._be_alone()
        if packet == NOW:
            self._patience.hurry()
        if (agreed := number_in(packet, AGREED)) is not None:
            self._persister.agree(agreed)
        if (serial := number_in(packet, RESTORED)) is not None:
            self._persister.agree_on(serial)
        self._last = self._last or packet == LAST
        self._closing = self._closing or packet == CLOSE

    def _be_alone(self) -> None:
        if not self._orphan:
            self._orphan = True
            self._patience.renew()

    def _report(self, message: Message) -> None:
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        with self._sending:
            while self._outbox and not self._orphan and send(self._end, encode(self._outbox[0])):
                sent = self._outbox.popleft()
                if isinstance(sent, FailedReport):
                    self._told.append(sent)

    def _log(self) -> None:
        failures = [*([] if self._closing else self._told), *(m for m in self._outbox if isinstance(m, FailedReport))]
        self._outbox.clear()
        if failures:
            write_log(self._config.store, self._directory_fd, list(dict.fromkeys(each.message for each in failures)))
