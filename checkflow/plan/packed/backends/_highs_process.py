"""HiGHS in a process of its own, which can be killed when it overruns its limit; what it had found is kept.

The two processes share a temporary folder: `program` and, later, `solution` are pickles of our own types, `best.npy` is
the newest incumbent, `bound` the newest lower bound, `log` is what the solver said.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from checkflow.background import environment, remove_written
from checkflow.errors import SolverError
from checkflow.interrupts import killed_at_the_end
from checkflow.plan.packed.backends._highs_here import solve_here
from checkflow.plan.packed.program import Floats, Log, OutOfTime, Program, Solution, SolverStatus, answer, in_time

OVERRUN = 1.0  # of the limit, and OVERRUN_S: how long HiGHS may take to notice that time is up
OVERRUN_S = 1.0


def solve_in_process(
    program: Program, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
) -> Solution:
    """Solve in a child process. Raises SolverError where it dies; Ctrl-C kills it and propagates.

    The child ends with this process, however this one ends: it reads from a pipe that nobody writes to.
    """
    began = time.monotonic()
    until = math.inf if time_limit_s is None else began + time_limit_s
    with tempfile.TemporaryDirectory(prefix="checkflow-highs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            with (folder / "program").open("wb") as stream:
                pickle.dump((replace(program, families={}), until, warm_start), _Until(stream, until))
        except OutOfTime:
            return answer(program, SolverStatus.TIMED_OUT, None, -np.inf, time.monotonic() - began, "highs")
        patience_s = None
        if time_limit_s is not None:
            patience_s = max(0.0, began + time_limit_s * OVERRUN + OVERRUN_S - time.monotonic())
        with (folder / "log").open("wb") as said:
            start = partial(
                subprocess.Popen[bytes],
                [sys.executable, "-m", __name__, name],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env=environment(),
            )
            with killed_at_the_end(start) as child, suppress(subprocess.TimeoutExpired):
                child.wait(patience_s)
            assert child.stdin is not None
            child.stdin.close()
        text = (folder / "log").read_text(errors="replace")
        if log is not None:
            for line in text.splitlines():
                log(line)
        wall_s = time.monotonic() - began
        if (folder / "solution").exists():
            with (folder / "solution").open("rb") as stream:
                solution: Solution = pickle.load(stream)
            return replace(solution, wall_s=wall_s)
        if child.returncode != -9:
            last = (text.strip().splitlines() or ["it said nothing"])[-1]
            raise SolverError(f"solver highs: its process died ({last}); choose another solver")
        return _cut_short(program, folder, wall_s)


class _Until:
    """A file that takes nothing more once the time is up."""

    def __init__(self, stream: BinaryIO, until: float) -> None:
        self._stream, self._until = stream, until

    def write(self, content: bytes) -> int:
        in_time(self._until)
        return self._stream.write(content)


def _cut_short(program: Program, folder: Path, wall_s: float) -> Solution:
    bound = float((folder / "bound").read_text()) if (folder / "bound").exists() else -np.inf
    if not (folder / "best.npy").exists():
        return answer(program, SolverStatus.TIMED_OUT, None, bound, wall_s, "highs")
    return answer(program, SolverStatus.FEASIBLE, np.load(folder / "best.npy"), bound, wall_s, "highs")


def _publish(path: Path, content: bytes) -> None:
    """Whole or not at all: the reader may look, and the writer be killed, at any time."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)


def _end_with_parent(folder: Path) -> None:
    """Wait until the parent is gone, which then cannot clean up, and go, too."""
    sys.stdin.buffer.read()
    remove_written(folder)
    os._exit(1)


def main(folder: Path) -> None:
    """What the child does."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    with (folder / "program").open("rb") as stream:
        program, until, warm_start = pickle.load(stream)
    time_limit_s = None if until == math.inf else max(0.01, until - time.monotonic())  # one clock for all processes

    def progress(x: Floats | None, bound: float) -> None:
        if x is not None:
            content = io.BytesIO()
            np.save(content, x)
            _publish(folder / "best.npy", content.getvalue())
        _publish(folder / "bound", repr(float(bound)).encode())

    solution = solve_here(program, time_limit_s, warm_start, lambda line: print(line, flush=True), progress)  # noqa: T201
    _publish(folder / "solution", pickle.dumps(solution))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
