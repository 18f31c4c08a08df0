"""Processes of tests that begin with PyTorch imported, which takes seconds: forks of one that has done no more.

    python nursery.py SOCKET: each request, with the descriptors for its output, is a fork that runs a script as its own
    `python SCRIPT` would; its end is told.

It has one thread and has computed nothing, so that a fork is what a start would have been, but for the seed of str's
hash: with HYPOTHESIS_PROFILE=nightly each process is started, and has another one.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

MOST_BYTES = 2**16


class Process(Protocol):
    """What tests need of a process that was started or forked."""

    pid: int
    stdout: IO[str] | None
    stderr: IO[str] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class Forked:
    """A child of the nursery, in a session of its own."""

    def __init__(self, nursery: Nursery, pid: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.stderr: IO[str] | None = stderr
        self._nursery = nursery

    def poll(self) -> int | None:
        """As subprocess.Popen's."""
        return self._nursery.code(self.pid, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        """As subprocess.Popen's."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._nursery.code(self.pid, 0.1)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """As subprocess.Popen's."""
        if self.poll() is None:
            os.kill(self.pid, sig)


class Nursery:
    """The process, and what it has told."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
        )
        theirs.close()
        self._codes: dict[int, int] = {}

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """`python ARGUMENTS`, the first of which is a script."""
        streams = []
        with _closing() as theirs:
            for _ in range(2):
                reads, writes = os.pipe()
                streams.append(os.fdopen(reads, encoding="utf-8"))
                theirs.append(writes)
            request = {
                "arguments": list(arguments),
                "environment": dict(environment),
                "directory": os.fspath(Path.cwd()),
            }
            socket.send_fds(self._end, [json.dumps(request).encode()], theirs)
        while True:
            pid, code = json.loads(self._end.recv(MOST_BYTES))
            if code is None:
                return Forked(self, pid, *streams)
            self._codes[pid] = code

    def code(self, pid: int, timeout_s: float) -> int | None:
        """With which a child has ended; None where that is not told within this time."""
        while pid not in self._codes and select.select([self._end], [], [], timeout_s)[0]:
            ended, code = json.loads(self._end.recv(MOST_BYTES))
            self._codes[ended] = code
        return self._codes.get(pid)


class _closing(list[int]):
    def __enter__(self) -> _closing:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self:
            os.close(fd)


@functools.cache
def _nursery() -> Nursery:
    return Nursery()


def start(arguments: Sequence[str], environment: Mapping[str, str]) -> Process:
    """`python ARGUMENTS`, the first of which is a script, in a session of its own, its output in pipes of text."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "nightly":
        return _nursery().fork(arguments, environment)
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environment),
        start_new_session=True,
    )


def serve(end: socket.socket) -> list[str]:
    """Returns in each child, with the arguments of its process; and with none once nobody has the other end."""
    children: dict[int, int] = {}  # pidfd -> pid
    while True:
        for fd in select.select([end.fileno(), *children], [], [])[0]:
            if fd == end.fileno():
                request, fds, _, _ = socket.recv_fds(end, MOST_BYTES, 2)
                if not request:
                    return []
                asked = json.loads(request)
                pid = os.fork()
                if pid == 0:
                    end.close()
                    for pidfd in children:
                        os.close(pidfd)
                    _become(asked["environment"], asked["directory"], fds)
                    arguments: list[str] = asked["arguments"]
                    return arguments
                for each in fds:
                    os.close(each)
                children[os.pidfd_open(pid)] = pid
                end.send(json.dumps([pid, None]).encode())
            else:
                pid = children.pop(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                end.send(json.dumps([pid, code]).encode())


def _become(environment: Mapping[str, str], directory: str, fds: Sequence[int]) -> None:
    os.setsid()
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)


if __name__ == "__main__":
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401 (for those that use it)

    import checkflow

    checkflow.attach  # noqa: B018 (imported when it is named)
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    if sys.argv:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        __file__ = sys.argv[0]
        exec(compile(Path(__file__).read_bytes(), __file__, "exec"))
