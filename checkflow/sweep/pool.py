"""Worker processes: started, given jobs, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType

from checkflow.background import environment
from checkflow.errors import CheckflowError
from checkflow.interrupts import held_back
from checkflow.sweep.isolated import how_it_ended
from checkflow.sweep.jobs import Job, Reply

PATIENCE_S = 5.0  # with a process that has closed its socket and not yet ended


@dataclass(frozen=True)
class Replied:
    """A worker's reply; after the last one the worker is free."""

    job: Job
    reply: Reply
    last: bool


@dataclass(frozen=True)
class Died:
    """A worker ended in the middle of a job: killed for memory, or by a crash of native code."""

    job: Job
    how: str


class Pool:
    """Up to `size` processes. As a context: at its end, however it comes, none of them is left."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: deque[Job] = deque()
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Working] = {}

    def __enter__(self) -> Pool:
        self._folder = tempfile.TemporaryDirectory(prefix="checkflow-sweep-", ignore_cleanup_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in (*self._idle, *(working.worker for working in self._busy.values())):
            worker.kill()
        self._folder.cleanup()

    def submit(self, job: Job, *, first: bool = False) -> None:
        """Queue a job, in front of all others if it is to be `first`."""
        (self._jobs.appendleft if first else self._jobs.append)(job)

    def events(self) -> Iterator[Replied | Died]:
        """What the workers say, until all jobs are done. Jobs may be submitted meanwhile."""
        while self._jobs or self._busy:
            while self._jobs and (self._idle or len(self._busy) < self._size):
                with held_back(sigterm=True):  # what is started is what kill() reaches
                    worker = self._idle.pop() if self._idle else _Worker(self._folder.name)
                    job = self._jobs.popleft()
                    self._busy[worker.connection] = _Working(worker, job, job.replies)
                worker.send(job)
            for connection in wait(list(self._busy)):
                assert isinstance(connection, Connection)
                yield self._event(connection)

    def _event(self, connection: Connection) -> Replied | Died:
        working = self._busy[connection]
        try:
            reply: Reply = connection.recv()
        except (EOFError, OSError):
            del self._busy[connection]
            return Died(working.job, working.worker.ended())
        working.to_come -= 1
        if not working.to_come:
            del self._busy[connection]
            self._idle.append(working.worker)
        return Replied(working.job, reply, last=not working.to_come)


class _Worker:
    """One process and our end of its socket."""

    def __init__(self, folder: str) -> None:
        if not sys.executable:
            raise CheckflowError("sweep: this Python does not know its own program; start it with a python command")
        ours, theirs = socket.socketpair()
        settings = {"TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        said = None if os.environ.get("CHECKFLOW_DEBUG") else subprocess.DEVNULL
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "checkflow.sweep.worker", str(theirs.fileno()), folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what users' models print is no part of the answer
                stderr=said,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment() | settings,
            )
        self.connection = Connection(ours.detach())

    def send(self, job: Job) -> None:
        with suppress(OSError):  # it is dead, which the next recv tells
            self.connection.send(job)

    def ended(self) -> str:
        """How it ended; it has closed its end of the socket."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        code = self._process.poll()
        self.kill()
        return how_it_ended(code)

    def kill(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


@dataclass
class _Working:
    """A worker that has a job."""

    worker: _Worker
    job: Job
    to_come: int  # replies
