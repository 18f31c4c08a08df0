"""The saver's loop: persist what is due; when the trainer is gone, persist the newest staged checkpoint and end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from checkflow.store.config import SaverConfig
from checkflow.store.disk import Disk
from checkflow.store.messages import CLOSE, LAST, MAX_TEXT, Failed, Message, encode, send
from checkflow.store.opening import open_regular
from checkflow.store.persist import Persister, Written
from checkflow.store.settler import Settler
from checkflow.store.shared import SharedMemory
from checkflow.store.take import Taken, recover, take_due, take_last
from checkflow.text import plain

LOOK_MS = 20  # how often to look after what is settled in the background, where nothing else wakes the saver
LOG = "saver.log"  # errors that came too late for any trainer to hear; the next one tells them
MAX_TOLD = 20  # lines of it


class Saver:
    """Runs until the trainer closes or dies. `trainer` is a pidfd of it."""

    def __init__(self, shared: SharedMemory, disk: Disk, end: socket.socket, trainer: int) -> None:
        self._shared = shared
        self._config = SaverConfig.parse(shared.config)
        self._end = end
        self._trainer = trainer
        self._outbox: deque[Message] = deque()
        self._last = self._closing = self._orphan = self._last_tried = False
        self._persister = Persister(shared, self._config, disk, self._report)
        self._settler = Settler(self._settle)
        self._sending = threading.Lock()  # reports come from the settler's thread too
        self._told: deque[Failed] = deque(maxlen=100)  # sent, maybe to a trainer that died before it listened

    def run(self) -> None:
        """Until the trainer is gone and all that can be durable is."""
        recover(self._shared)
        try:
            self._persister.remove_leftovers()
        except OSError as error:
            self._report(Failed(sequence=0, message=f"{self._config.store}: leftovers cannot be removed ({error})"))
        while self._next():
            pass

    def fail(self, message: str) -> None:
        """Report the saver's own end."""
        self._settler.close()
        self._report(Failed(sequence=0, message=message[:MAX_TEXT]))
        if self._orphan:
            self._log()

    def _next(self) -> bool:
        """Do one thing; False at the end."""
        self._listen(0)
        taken = take_due(self._shared)
        if taken is None and self._orphan and not self._last_tried:
            self._last_tried = True  # with nobody to tell, an error must not be tried for ever
            taken = take_last(self._shared)
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
        if self._orphan:
            self._log()
            return False
        if self._closing and not self._outbox:
            return False
        self._listen(None)
        return True

    def _persist(self, taken: Taken) -> None:
        busy = self._settler.busy  # what is settled meanwhile makes room just as what is waited for
        written = self._persister.write(taken, lambda: self._settler.wait() or busy)
        self._listen(0)
        if written is not None:
            self._settler.add(written)

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
                self._orphan = True
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._hear()
        self._flush()

    def _hear(self) -> None:
        while True:
            try:
                packet = self._end.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._orphan = True
                return
            self._last = self._last or packet == LAST
            self._closing = self._closing or packet == CLOSE

    def _report(self, message: Message) -> None:
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        with self._sending:
            while self._outbox and not self._orphan and send(self._end, encode(self._outbox[0])):
                sent = self._outbox.popleft()
                if isinstance(sent, Failed):
                    self._told.append(sent)

    def _log(self) -> None:
        failures = [*([] if self._closing else self._told), *(m for m in self._outbox if isinstance(m, Failed))]
        self._outbox.clear()
        if failures:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with contextlib.suppress(OSError):
                fd = open_regular(self._config.store / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                with os.fdopen(fd, "a", encoding="utf-8") as log:
                    log.writelines(f"{when} saver {os.getpid()}: {failure.message}\n" for failure in failures)


def take_log(store: Path) -> tuple[str, ...]:
    """The errors that a former saver had nobody to tell, removed from the store by this."""
    path = store / LOG
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as log:
            lines = log.read(2**16).decode(errors="replace").splitlines()
        path.unlink()
    except FileNotFoundError:
        return ()
    except OSError as error:
        return (f"{LOG} cannot be read and removed ({error.strerror}); remove it",)
    more = (f"... and {len(lines) - MAX_TOLD} lines more",) if len(lines) > MAX_TOLD else ()
    return (*(plain(line) for line in lines[:MAX_TOLD]), *more)
