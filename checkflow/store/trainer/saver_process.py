"""Starting the saver, hearing it, and seeing it end."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import sys
from collections.abc import Iterator

from checkflow.errors import StoreError
from checkflow.store.both.beside import socket_ends, start_beside, unstarted
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.messages import Message, receive, send
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.text import plain

_WORDS_BYTES = 2**16


class SaverProcess:
    """A running saver, seen from the trainer."""

    def __init__(self, shared: SharedMemory, lock: StoreLock) -> None:
        """Start it. Raises StoreError where no process can be started."""
        if not sys.executable:
            raise StoreError("saver: this Python does not know its own program; start training with a python command")
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            try:
                ours, theirs = socket_ends()
                kept.callback(ours.close)
                passed.callback(theirs.close)
                trainer = os.pidfd_open(os.getpid())
                passed.callback(os.close, trainer)
                words = _words()
                kept.callback(os.close, words)
                inherited = (shared.fd, theirs.fileno(), lock.directory_fd, lock.saver_fd, trainer)
                self._process = start_beside("checkflow.store.saver", (), inherited, words)
                kept.callback(self._process.wait, math.inf)  # unseen it would take the slots of the next one's
                kept.callback(self._process.kill)
                self.pidfd = os.pidfd_open(self._process.pid)  # readable once it has ended
            except OSError as error:
                raise unstarted("saver: cannot be started", error) from None
            kept.pop_all()
        self._end, self._words = ours, words
        self._hung_up = False  # its end of the socket is closed: it says nothing more, and is about to end
        lock.name_holder(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stirs(self, timeout_s: float) -> bool:
        """Whether it says something, or has ended, within this time."""
        poll = select.poll()  # a new one each time: a signal handler may wait beside who was interrupted in waiting
        if self._end.fileno() < 0:  # and may have closed it
            return True
        poll.register(self.pidfd, select.POLLIN)
        if not self._hung_up:
            poll.register(self._end, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def tell(self, word: bytes) -> None:
        """Never waits: a saver that does not listen looks at the slots by itself once it does."""
        send(self._end, word)

    def messages(self) -> Iterator[Message]:
        """What it has said since."""
        while self._end.fileno() >= 0:
            try:
                message = receive(self._end)
            except EOFError:
                self._hung_up = True
                return
            if message is None:
                return
            yield message

    def ended(self) -> str | None:
        """How it ended, with the last line it wrote to its standard error; None while it runs."""
        if not self._process.has_ended():
            return None
        how = self._process.how_it_ended()
        said = os.pread(self._words, _WORDS_BYTES, 0).rstrip(b"\0").decode(errors="replace").split("\n")
        last = next((plain(line, 300) for line in reversed(said) if line.strip()), "")
        return f"{how}: {last}" if last else how

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in this time."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Close our ends; a saver that still runs takes that for our death."""
        self._end.close()
        for fd in (self.pidfd, self._words):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self._words = -1


def _words() -> int:
    """For its standard error: memory of this size and no more, that nobody has to read while it runs."""
    fd = os.memfd_create("checkflow-saver-stderr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _WORDS_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd
