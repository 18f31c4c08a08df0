"""Starting a process beside the trainer, that is to outlive it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from checkflow.background import python_path
from checkflow.errors import StoreError, remedy
from checkflow.store.both.words import IGNORED
from checkflow.streams import open_closed

_TALKATIVE = ("PYTHONVERBOSE", "PYTHONPROFILEIMPORTTIME")  # its standard error is small, and closed once it is full


def socket_ends() -> tuple[socket.socket, socket.socket]:
    """Ours, and the one that the process inherits, which keep packets apart. Raises OSError.

    The first of what it inherits to be opened: where the trainer has closed its streams since, none gets their numbers.
    """
    open_closed()
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def start_beside(
    module: str, arguments: Sequence[str], inherited: Sequence[int], stderr: int
) -> subprocess.Popen[bytes]:
    """`python -m module arguments descriptors`, in its own session. Raises OSError."""
    command = [sys.executable, "-P", "-m", module, *arguments, *map(str, inherited)]
    environment = {name: value for name, value in os.environ.items() if name not in _TALKATIVE} | {
        "PYTHONPATH": python_path(),
        "OPENBLAS_NUM_THREADS": "1",  # numpy starts one for each core
        "PYDANTIC_DISABLE_PLUGINS": "__all__",  # the trainer's: they may import anything, and fail
    }
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # inherited, until it ignores them by itself
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=inherited,
            start_new_session=True,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def unstarted(what: str, error: OSError) -> StoreError:
    """What is to be raised where a process cannot be started."""
    return StoreError(f"{what} ({error.strerror}); {remedy(error, 'free processes or memory')}")
