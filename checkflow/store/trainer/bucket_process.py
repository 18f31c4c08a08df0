"""Starting the uploader on this machine, hearing it, and ending it. Training never waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections import deque
from collections.abc import Callable

from checkflow.errors import StoreError
from checkflow.interrupts import let_through
from checkflow.store.both.beside import socket_ends, start_beside, unstarted
from checkflow.store.both.config import BucketConfig
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.messages import FailedReport, Notice, PassedReport, RestReport, UploadedReport, receive, send
from checkflow.store.both.retry import Patience
from checkflow.store.both.words import CLOSE, DROPPED, LAST, THERE, UPLOAD, numbered
from checkflow.store.trainer.status import Tally

UNHEARD_S = 0.05
PATIENT_S = 5.0  # an end that takes longer is told
_started: list[subprocess.Popen[bytes]] = []  # also those that go on by themselves; collected when they have ended


class BucketProcess:
    """It holds nothing of the store: the next trainer need not wait for it."""

    def __init__(self, config: BucketConfig, lock: StoreLock, tally: Tally, notify: Callable[[str], None]) -> None:
        """Start it. Raises StoreError where it cannot be started."""
        self._config = config
        self._lock = lock
        self._tally = tally
        self._notify = notify
        self._patience = Patience(config.retry_s)
        self.is_over = False  # it has said that it uploads no more
        self._is_at_rest = False  # it has uploaded what is newest, as it was told
        self._asked: int | None = None  # what a group wants next, until it is done
        self.done: deque[UploadedReport | PassedReport] = deque(maxlen=100)  # for whoever tells the other ranks
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> None:
        """Tell what it has said, and start another one where it has died. Never waits."""
        self._hear()
        if self.is_over or self._process.poll() is None or self._patience.wait_s:
            return
        if self._patience.fails():
            self._notify(f"{self._config.url}: the uploader died, and is started again; check memory limits")
        with contextlib.suppress(StoreError):
            self._end.close()
            self._start()

    def upload(self, serial: int) -> None:
        """Of a group: this one is next."""
        self._asked = serial
        self._say(numbered(UPLOAD, serial))

    def settle(self, serial: int, *, is_whole: bool) -> None:
        """Of a group: the bucket has every rank's part of this one, or never will."""
        self._say(numbered(THERE if is_whole else DROPPED, serial))

    def wait(self, deadline: float) -> bool:
        """Whether the bucket has what is newest on disk by then (of time.monotonic)."""
        self._is_at_rest = False
        self._say(LAST)
        while not (self._is_at_rest or self.is_over):
            if (code := self._process.poll()) is not None:
                return code == 0  # told to end, it ends once the bucket has all
            if time.monotonic() >= deadline:
                return False
            self._stirs(deadline - time.monotonic())
            self._hear()
        return self._is_at_rest

    def close(self, deadline_s: float) -> None:
        """End it once the bucket has what is newest on disk; where that takes longer it goes on by itself, which is
        told."""
        if self._end.fileno() < 0:
            return
        began, told = time.monotonic(), False
        try:
            self.poll()
            self._say(CLOSE)
            while self._process.poll() is None and time.monotonic() < began + deadline_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.1)
                self._hear()
                let_through()
                if not told and time.monotonic() >= began + PATIENT_S:
                    told = True
                    self._notify(f"{self._config.url}: waiting until the last checkpoint is uploaded")
            self._hear()
            if self._process.poll() is None and deadline_s:
                self._notify(f"{self._config.url}: does not have the last checkpoint yet; process {self.pid} goes on")
        finally:
            self.disown()

    def disown(self) -> None:
        """Close our end: it takes that for the trainer's, unless this is a forked child and its parent has it."""
        self._end.close()

    def _start(self) -> None:
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            try:
                ours, theirs = socket_ends()
                kept.callback(ours.close)
                passed.callback(theirs.close)
                trainer = os.pidfd_open(os.getpid())
                passed.callback(os.close, trainer)
                # opened anew: with the lock's own descriptor it would hold the store
                directory = os.open(f"/proc/self/fd/{self._lock.directory_fd}", os.O_RDONLY | os.O_DIRECTORY)
                passed.callback(os.close, directory)
                inherited = (theirs.fileno(), directory, trainer)
                self._process = start_beside("checkflow.store.bucket", (), inherited, subprocess.DEVNULL)
                ours.send(self._config.dump())
            except OSError as error:
                raise unstarted("bucket: no uploader can be started", error) from None
            kept.pop_all()
        self._end = ours
        if self._asked is not None:
            self._say(numbered(UPLOAD, self._asked))
        _started[:] = [*(process for process in _started if process.poll() is None), self._process]

    def _say(self, word: bytes) -> None:
        """It may have died, which is seen later."""
        if self._end.fileno() >= 0:
            send(self._end, word)

    def _stirs(self, timeout_s: float) -> None:
        """Wait until it says something or hangs up; a little while where nobody hears it any more."""
        if self._end.fileno() < 0:
            time.sleep(min(UNHEARD_S, max(0.0, timeout_s)))
            return
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)

    def _hear(self) -> None:
        while self._end.fileno() >= 0:
            try:
                message = receive(self._end)
            except EOFError:
                return
            if message is None:
                return
            if isinstance(message, UploadedReport):
                self._patience.succeeds()
                self._tally.upload(message.iteration, message.size_bytes, message.upload_ns)
                self._is_done(message)
            elif isinstance(message, PassedReport):
                self._is_done(message)
            elif isinstance(message, RestReport):
                self._is_at_rest = True
            elif isinstance(message, FailedReport):
                self.is_over = True
                self._tally.fail(message.message)
                self._notify(message.message)
            elif isinstance(message, Notice):
                self._notify(message.message)

    def _is_done(self, report: UploadedReport | PassedReport) -> None:
        if report.serial == self._asked:
            self._asked = None
            self.done.append(report)
