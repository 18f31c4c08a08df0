"""Starting a process beside the trainer, that is to outlive it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from checkflow.background import environment
from checkflow.errors import StoreError, remedy
from checkflow.store.both.words import IGNORED
from checkflow.streams import open_closed

_LOOK_S = 0.01


class Beside:
    """A process that this one started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._has_ended = False
        self.exit_code: int | None = None  # negative for a signal; None while it runs, and where nobody can know it

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Never waits. Its exit code is known unless another took it: the system, where SIGCHLD is ignored, or a
        handler of the program's. Popen then calls it 0."""
        if not self._has_ended:
            try:
                seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                pass
            else:
                if seen is None:
                    return False
                self.exit_code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
            self._has_ended = True
            self._process.wait()  # collects it
        return True

    def how_it_ended(self) -> str:
        """For a person."""
        if self.exit_code is None:
            return "exit code unknown"
        return f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended():
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(_LOOK_S, left_s))
        return True

    def kill(self) -> None:
        if not self.has_ended():  # its number may be another's then
            self._process.kill()


def socket_ends() -> tuple[socket.socket, socket.socket]:
    """Ours, and the one that the process inherits, which keep packets apart. Raises OSError.

    The first of what it inherits to be opened: where the trainer has closed its streams since, none gets their numbers.
    """
    open_closed()
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def start_beside(module: str, arguments: Sequence[str], inherited: Sequence[int], stderr: int) -> Beside:
    """`python -m module arguments descriptors`, in its own session. Raises OSError."""
    command = [sys.executable, "-P", "-m", module, *arguments, *map(str, inherited)]
    settings = {
        "OPENBLAS_NUM_THREADS": "1",  # numpy starts one for each core
        "PYDANTIC_DISABLE_PLUGINS": "__all__",  # the trainer's: they may import anything, and fail
    }
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # inherited, until it ignores them by itself
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=inherited,
            start_new_session=True,
            env=environment() | settings,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    return Beside(process)


def unstarted(what: str, error: OSError) -> StoreError:
    """What is to be raised where a process cannot be started."""
    return StoreError(f"{what} ({error.strerror}); {remedy(error, 'free processes or memory')}")
