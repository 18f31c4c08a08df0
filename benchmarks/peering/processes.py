"""The driver's side of a worker: start it, ask it, freeze it between its turns, see its memory and its writes.

Frozen, not idle: what a tool has in the background stops at the end of its turn and goes on at the next, so it takes
nothing from whoever has the turn in between, and a turn shows the tool's steady state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeVar

from .orders import Answer, Detach, Failed, Order

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
BENCHMARKS = Path(__file__).parent.parent

A = TypeVar("A")


class ToolError(Exception):
    """The contender raised in the worker, or ended it."""


class NoAnswerError(ToolError):
    """Nor did it die."""


class Started(Protocol):
    """What is asked of a process; as subprocess has it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start(workload: str, contender: str, driver: Connection, log: Path) -> Started:
    """A worker in an interpreter of its own, which answers at `driver`."""
    path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "peering.worker", workload, contender, str(driver.fileno())],
            env=os.environ | KEEP_MEMORY | {"PYTHONPATH": path},
            pass_fds=[driver.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=output,
        )


class Process:
    """A worker."""

    def __init__(self, workload: str, contender: str, log: Path) -> None:
        ours, theirs = Pipe()
        self.started = time.monotonic()
        self._process = start(workload, contender, theirs, log)
        theirs.close()
        self._pipe = ours
        self._log = log
        self._gone_bytes: dict[int, int] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, order: Order) -> None:
        """Raises ToolError where the worker has ended."""
        try:
            self._pipe.send(order)
        except (BrokenPipeError, ConnectionError):
            raise ToolError(f"the process ended with {self._process.wait()}; see {self._log}") from None

    def hear(self, kind: type[A], timeout_s: float | None = None) -> A:
        """The answer. Raises ToolError where the contender raised, died, or took longer."""
        if timeout_s is not None and not self._pipe.poll(timeout_s):
            raise NoAnswerError(f"no answer in {timeout_s:g} s")
        try:
            answer: Answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise ToolError(f"the process ended with {self._process.wait()}; see {self._log}") from None
        if isinstance(answer, Failed):
            raise ToolError(answer.message)
        assert isinstance(answer, kind), answer
        return answer

    def answered(self, timeout_s: float) -> bool:
        """Whether `hear` would return at once; waits so long for it."""
        return self._pipe.poll(timeout_s)

    def ask(self, order: Order, kind: type[A], timeout_s: float | None = 300.0) -> A:
        self.tell(order)
        return self.hear(kind, timeout_s)

    def freeze(self) -> None:
        """It and everything that it started."""
        for pid in tree(self.pid):
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in tree(self.pid):
            _signal(pid, signal.SIGCONT)

    def kill_trainer(self) -> None:
        """SIGKILL of the worker alone: what it started finds itself without it."""
        _signal(self.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def end(self) -> None:
        """Close the tool and wait for the process."""
        with contextlib.suppress(ToolError, OSError):
            self.tell(Detach())
            self._pipe.poll(120.0)
        self._pipe.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            kill_all(self.pid)
            self._process.wait()

    def memory_bytes(self) -> int:
        """Private memory of all its processes, and what they share counted once. The page cache is not in it."""
        private, shared = 0, 0
        for pid in tree(self.pid):
            fields = _status(pid)
            private += fields.get("RssAnon", 0)
            shared = max(shared, fields.get("RssShmem", 0))
        return private + shared

    def written_bytes(self) -> int:
        """What all its processes, those that ended included, gave to a file system on a disk."""
        for pid in tree(self.pid):
            with contextlib.suppress(OSError, ValueError):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                fields = dict(line.split(": ") for line in lines)
                self._gone_bytes[pid] = int(fields["write_bytes"])
        return sum(self._gone_bytes.values())


@contextlib.contextmanager
def worker(workload: str, contender: str, log: Path) -> Iterator[Process]:
    process = Process(workload, contender, log)
    try:
        yield process
    finally:
        process.thaw()
        process.end()


def kill_all(pid: int) -> None:
    """A process and all its descendants, stopped first, so that none sees another die."""
    everything = tree(pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in everything:
            _signal(each, number)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _status(pid: int) -> dict[str, int]:
    """Fields of /proc/PID/status that count bytes."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return {}
