"""Starting the mirror on this machine, of another rank's slots, and ending it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkflow.errors import StoreError
from checkflow.interrupts import let_through
from checkflow.store.both.beside import socket_ends, start_beside, unstarted
from checkflow.store.both.lock import StoreLock
from checkflow.store.both.words import CLOSE, MAX_LINE_BYTES
from checkflow.store.trainer.lingering import Lingering

START_S = 60.0
END_S = 600.0  # for a slow disk; then it goes on alone
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class MirrorAddress:
    """Where a mirror listens, and what who comes has to know."""

    host: str
    port: int
    key: str


class MirrorProcess:
    """It holds the store, as the saver does: the next trainer waits until it has ended."""

    def __init__(self, lock: StoreLock, host: str) -> None:
        """Start it, to listen on this address of the machine. Raises StoreError where it cannot be started."""
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            try:
                self._end, theirs = socket_ends()
                kept.callback(self._end.close)
                passed.callback(theirs.close)
                trainer = os.pidfd_open(os.getpid())
                passed.callback(os.close, trainer)
                inherited = (theirs.fileno(), lock.directory_fd, lock.saver_fd, trainer)
                self._process = start_beside("checkflow.store.mirror", (host,), inherited, subprocess.DEVNULL)
            except OSError as error:
                raise unstarted("replicate: no mirror can be started", error) from None
            theirs.close()
            key = secrets.token_hex(16)
            self._end.send(key.encode())
            self._end.settimeout(START_S)
            try:
                port = self._end.recv(64)
            except OSError:
                port = b""
            if not port:
                self._process.kill()
                raise StoreError(
                    f"replicate: the mirror cannot listen on {host}; see that MASTER_ADDR is reached over the network "
                    "that ranks have in common"
                )
            self.address = MirrorAddress(host, int(port), key)
            kept.pop_all()

    def end(self, notify: Callable[[str], None], tell: Callable[[str], None]) -> None:
        """Every rank has ended: what it holds of the last checkpoint is written down. Waits for that, and tells."""
        lingering, deadline = Lingering("replicate", tell), time.monotonic() + END_S
        with self._end, contextlib.suppress(OSError):
            self._end.send(CLOSE)
            self._end.settimeout(_LOOK_S)
            while time.monotonic() < deadline:
                try:
                    line = self._end.recv(MAX_LINE_BYTES)
                except TimeoutError:
                    lingering.until("what this machine holds of another rank's last checkpoint is on disk")
                    let_through()
                    continue
                if not line:  # it has ended
                    break
                notify(line.decode(errors="replace"))
        self._process.wait(max(0.0, deadline - time.monotonic()))

    def let_go(self) -> None:
        """It writes down all that it holds, and is not waited for."""
        self._end.close()
