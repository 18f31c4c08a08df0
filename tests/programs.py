"""Python programs in processes of their own, forked from one that has imported torch and done nothing else.

A new interpreter takes two and a half seconds for torch and for its compiler, which the first update imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

HANGS_S = 300.0  # what has not ended by then never will
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "checkflow.checkpointing.attach"])


class Program:
    """One that runs; what it writes to standard error goes to a file."""

    def __init__(self, text: str, *arguments: str, stderr: Path) -> None:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self._stderr = stderr
        self._process = CONTEXT.Process(target=_run, args=(text, arguments, dict(os.environ), theirs, stderr))
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        ours.close()
        self._watch = threading.Timer(HANGS_S, self._process.kill)
        self._watch.start()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def until(self, said: str) -> None:
        """Until it says this line."""
        while (line := self.stdout.readline()) and line.strip() != said:
            pass
        assert line, self.complaint()

    def end(self) -> tuple[int, str]:
        """Its exit code, negative for a signal, and what it has said since."""
        with self.stdout:
            rest = self.stdout.read()
        self._process.join()
        self._watch.cancel()
        self._watch.join()
        code = self._process.exitcode
        assert code is not None
        self._process.close()
        return code, rest

    def complaint(self) -> str:
        """What it wrote to standard error."""
        return self._stderr.read_text()


def _run(text: str, arguments: tuple[str, ...], environment: dict[str, str], stdout: Connection, stderr: Path) -> None:
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    with stderr.open("a") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["program", *arguments]
    exec(compile(text, "program", "exec"), {"__name__": "__main__"})
