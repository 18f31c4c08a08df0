"""HiGHS in a process of its own, which can be killed when it overruns its limit; what it had found is kept.

The two processes share a temporary folder: `program` and, later, `solution` are pickles of our own types, `best.npy` is
the newest incumbent, `bound` the newest lower bound, `log` is what the solver said.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from checkflow.errors import SolverError
from checkflow.solve.backends.highs import solve_here
from checkflow.solve.program import Floats, Log, Program, Solution, Status, answer

OVERRUN = 1.05  # of the limit, and OVERRUN_S: how long HiGHS may take to notice that time is up
OVERRUN_S = 8.0  # includes the process's start


def solve_in_process(
    program: Program, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
) -> Solution:
    """Solve in a child process. Raises SolverError where it dies; Ctrl-C kills it and propagates."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="checkflow-highs-") as name:
        folder = Path(name)
        with (folder / "program").open("wb") as stream:
            pickle.dump((replace(program, families={}), time_limit_s, warm_start), stream)
        patience_s = None if time_limit_s is None else time_limit_s * OVERRUN + OVERRUN_S
        with (folder / "log").open("wb") as said:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, name],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            try:
                child.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                child.kill()
                child.wait()
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


def _cut_short(program: Program, folder: Path, wall_s: float) -> Solution:
    bound = float((folder / "bound").read_text()) if (folder / "bound").exists() else -np.inf
    if not (folder / "best.npy").exists():
        return answer(program, Status.TIMED_OUT, None, bound, wall_s, "highs")
    return answer(program, Status.FEASIBLE, np.load(folder / "best.npy"), bound, wall_s, "highs")


def _publish(path: Path, content: bytes) -> None:
    """Whole or not at all: the reader may look, and the writer be killed, at any time."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)


def main(folder: Path) -> None:
    """What the child does."""
    with (folder / "program").open("rb") as stream:
        program, time_limit_s, warm_start = pickle.load(stream)

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
