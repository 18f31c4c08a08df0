"""Starting the process that brings a replica on: by the trainer, or by the saver of one that died without."""

from __future__ import annotations

import os
import socket
import subprocess

from checkflow.store.both.beside import Beside, socket_ends, start_beside
from checkflow.store.memory.replica_slots import hold
from checkflow.store.memory.shared_memory import SharedMemory


def start_replica(shared: SharedMemory) -> tuple[Beside, socket.socket]:
    """The process, and our end of its socket: once that is closed it ends when no delta is left. Raises OSError."""
    ours, theirs = socket_ends()
    try:
        with shared.locked():
            lock = hold(shared)
            try:
                inherited = (shared.fd, theirs.fileno(), lock)
                return start_beside("checkflow.replica", (), inherited, subprocess.DEVNULL), ours
            finally:
                os.close(lock)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
