"""Python programs in processes of their own, forked from one that has imported torch and done nothing else.

A new interpreter takes two and a half seconds for torch and for its compiler, which the first update imports.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

HANGS_S = 300.0  # what has not ended by then never will
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "checkflow.checkpointing.attach"])


class Program:
    """One that runs; what it writes to standard error goes to a file, or can be read.

    `session`: in one of its own, as what another machine or a terminal starts. `environment`: beside this process's.
    """

    def __init__(
        self,
        text: str,
        *arguments: str,
        stderr: Path | None = None,
        environment: Mapping[str, str] | None = None,
        session: bool = False,
    ) -> None:
        self._stderr = stderr
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(1 if stderr else 2)]
        given = dict(os.environ) | dict(environment or {})
        self._process = CONTEXT.Process(
            target=_run, args=(text, arguments, given, [theirs for _, theirs in pipes], stderr, session)
        )
        self._process.start()
        streams = []
        for ours, theirs in pipes:
            theirs.close()
            streams.append(os.fdopen(os.dup(ours.fileno())))
            ours.close()
        self.stdout, self.stderr = streams[0], streams[-1]
        self._watch = threading.Timer(HANGS_S, self._process.kill)
        self._watch.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def has_ended(self, timeout_s: float) -> bool:
        """Within that time."""
        self._process.join(timeout_s)
        return self._process.exitcode is not None

    def wait(self, timeout_s: float) -> int:
        """Its exit code once it has ended."""
        assert self.has_ended(timeout_s), "it runs on"
        code = self._process.exitcode
        assert code is not None
        self._watch.cancel()
        return code

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
        """What it wrote to its file for standard error."""
        assert self._stderr is not None
        return self._stderr.read_text()


def _run(
    text: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    outputs: list[Connection],
    stderr: Path | None,
    session: bool,
) -> None:
    if session:
        os.setsid()
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    if stderr is not None:
        with stderr.open("a") as file:
            os.dup2(file.fileno(), 2)
    faulthandler.enable()  # what it was at, where it is aborted
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["program", *arguments]
    exec(compile(text, "program", "exec"), {"__name__": "__main__"})
