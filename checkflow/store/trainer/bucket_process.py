"""Starting the uploader on this machine, hearing it, and ending it. Training never waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable

from checkflow.errors import StoreError
from checkflow.interrupts import let_through
from checkflow.store.both.beside import Beside, socket_ends, start_beside, unstarted
from checkflow.store.both.config import BucketConfig
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.messages import FailedReport, Notice, PassedReport, RestReport, UploadedReport, receive, send
from checkflow.store.both.retry import Patience
from checkflow.store.both.words import CLOSE, DROPPED, LAST, THERE, UPLOAD, numbered
from checkflow.store.trainer.lingering import Lingering
from checkflow.store.trainer.status import Tally

UNSTARTED = "bucket: no uploader can be started"
UNHEARD_S = 0.05
LOOK_S = 0.1  # while what is waited for may be interrupted
_started: list[Beside] = []  # also those that go on by themselves; collected when they have ended


class BucketProcess:
    """It holds nothing of the store: the next trainer need not wait for it."""

    def __init__(
        self,
        config: BucketConfig,
        lock: StoreLock,
        tally: Tally,
        notify: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """Start it. Raises StoreError where it cannot be started."""
        self._config = config
        self._tally = tally
        self._notify = notify
        self._tell = tell  # what is waited for
        self._patience = Patience(config.retry_s)
        self.is_over = False  # it has said that it uploads no more
        self._is_at_rest = False  # it has uploaded what is newest, as it was told
        self._has_all = False  # so it ends
        self._final: bytes | None = None  # LAST or CLOSE, while that is waited for: another one is told so, too
        self._is_let_go = False  # it goes on by itself
        self._asked: int | None = None  # what a group wants next, until it is done
        self.done: deque[UploadedReport | PassedReport] = deque(maxlen=100)  # for whoever tells the other ranks
        # Opened anew: with the lock's own descriptor it would hold the store, and that is closed before this is.
        try:
            self._directory = os.open(f"/proc/self/fd/{lock.directory_fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise unstarted(UNSTARTED, error) from None
        self._close_directory = weakref.finalize(self, os.close, self._directory)
        self._close_directory.atexit = False
        try:
            self._start()
        except BaseException:
            self._close_directory()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> None:
        """Tell what it has said, and start another one where it has died. Never waits."""
        self._tend()

    def upload(self, serial: int) -> None:
        """Of a group: this one is next."""
        self._asked = serial
        self._say(numbered(UPLOAD, serial))

    def settle(self, serial: int, *, is_whole: bool) -> None:
        """Of a group: the bucket has every rank's part of this one, or never will."""
        self._say(numbered(THERE if is_whole else DROPPED, serial))

    def wait(self, deadline: float) -> bool:
        """Whether the bucket has what is newest on disk by then (of time.monotonic)."""
        before, self._final = self._final, self._final or LAST
        try:
            self._is_at_rest = False
            self._patience.renew()
            self._say(LAST)
            while self._tend() and not self._is_at_rest and time.monotonic() < deadline:
                self._stirs(deadline - time.monotonic())
            return self._is_at_rest or self._has_all
        finally:
            self._final = before

    def close(self, deadline_s: float) -> None:
        """End it once the bucket has what is newest on disk; where that takes longer it goes on by itself, which is
        told."""
        if self._is_let_go:
            return
        until = time.monotonic() + deadline_s
        lingering = Lingering(self._config.url, self._tell)
        try:
            self._final = CLOSE
            self._patience.renew()
            self._say(CLOSE)
            while self._tend() and time.monotonic() < until:
                self._stirs(min(LOOK_S, until - time.monotonic()))
                let_through()
                lingering.until("the last checkpoint is uploaded")
            if not (self._has_all or self.is_over):
                self._tell_what_is_missing(deadline_s)
        finally:
            self.disown()

    def disown(self) -> None:
        """Close our end: it takes that for the trainer's, unless this is a forked child and its parent has it."""
        self._is_let_go = True
        self._close_directory()
        self._end.close()

    def _tend(self) -> bool:
        """Hear it, and start another one where it has died before it was done. Whether there is anything to wait for:
        it works, or another one will. Never waits."""
        has_ended = self._process.has_ended()  # asked first: its last word is heard
        self._hear()
        if not has_ended:
            return True
        if self._final == CLOSE and self._process.exit_code == 0:
            self._has_all = True
        if self.is_over or self._has_all or self._is_let_go or (self._final and self._patience.exhausted):
            return False
        if not self._patience.wait_s:
            self._start_again()
        return True

    def _start_again(self) -> None:
        begins, died, end = self._patience.fails(), f"the uploader died ({self._process.how_it_ended()})", self._end
        try:
            self._start()
        except StoreError as error:
            what = f"{died}, and no other can be started, which is tried again: {error}"
        else:
            end.close()
            what = f"{died}, and is started again; check memory limits"
        if begins:
            self._notify(f"{self._config.url}: {what}")

    def _tell_what_is_missing(self, waited_s: float) -> None:
        if self._process.has_ended():
            iteration = self._tally.durable_iteration
            what = "the last checkpoint" if iteration is None else f"iteration {iteration}"
            self._notify(
                f"{self._config.url}: may not have {what}: the uploader died ({self._process.how_it_ended()}); the "
                "disk has it, and the next run uploads it"
            )
        elif waited_s:
            self._notify(f"{self._config.url}: does not have the last checkpoint yet; process {self.pid} goes on")

    def _start(self) -> None:
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            try:
                ours, theirs = socket_ends()
                kept.callback(ours.close)
                passed.callback(theirs.close)
                trainer = os.pidfd_open(os.getpid())
                passed.callback(os.close, trainer)
                inherited = (theirs.fileno(), self._directory, trainer)
                self._process = start_beside("checkflow.store.bucket", (), inherited, subprocess.DEVNULL)
                ours.send(self._config.dump())
            except OSError as error:
                raise unstarted(UNSTARTED, error) from None
            kept.pop_all()
        self._end, self._is_unheard = ours, False
        if self._asked is not None:
            self._say(numbered(UPLOAD, self._asked))
        if self._final is not None:
            self._say(self._final)
        _started[:] = [*(process for process in _started if not process.has_ended()), self._process]

    def _say(self, word: bytes) -> None:
        """It may have died, which is seen later."""
        if self._end.fileno() >= 0:
            send(self._end, word)

    def _stirs(self, timeout_s: float) -> None:
        """Wait until it says something or hangs up; a little while where it says no more."""
        if self._end.fileno() < 0 or self._is_unheard:
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
                self._is_unheard = True
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
                self._has_all = self._has_all or message.is_end
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
