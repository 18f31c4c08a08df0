"""Starting the saver, hearing it, and seeing it end."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

from checkflow.errors import StoreError
from checkflow.store.lock import StoreLock
from checkflow.store.messages import Message, receive, send
from checkflow.store.shared import SharedMemory


class SaverProcess:
    """A running saver, seen from the trainer."""

    def __init__(self, shared: SharedMemory, lock: StoreLock) -> None:
        """Start it. Raises StoreError where no process can be started."""
        if not sys.executable:
            raise StoreError("saver: this Python does not know its own program; start training with a python command")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        trainer = os.pidfd_open(os.getpid())
        inherited = (shared.fd, theirs.fileno(), lock.saver_fd, trainer)
        command = [sys.executable, "-P", "-m", "checkflow.store.saver_main", *map(str, inherited)]
        # modules are found where the trainer finds them; one BLAS thread, for numpy starts one for each core
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise StoreError(f"saver: cannot be started ({error.strerror}); free processes or memory") from None
        finally:
            theirs.close()
            os.close(trainer)
        self._end = ours
        lock.name_holder(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stirs(self, timeout_s: float) -> bool:
        """Whether it says something, or has ended, within this time."""
        poll = select.poll()  # a new one each time: a signal handler may wait beside who was interrupted in waiting
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def tell(self, word: bytes) -> None:
        """Never waits: a saver that does not listen looks at the slots by itself once it does."""
        send(self._end, word)

    def messages(self) -> Iterator[Message]:
        """What it has said since."""
        while True:
            try:
                message = receive(self._end)
            except EOFError:
                return
            if message is None:
                return
            yield message

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in this time."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Close our end; a saver that still runs takes that for our death."""
        self._end.close()
