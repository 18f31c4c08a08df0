"""CBC: the binary that PuLP brings, in a process of its own. The model goes there as an MPS file."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import highspy
import numpy as np
import pulp

from checkflow.errors import SolverError
from checkflow.interrupts import killed_at_the_end
from checkflow.plan.packed.backends._highs_here import highs_model
from checkflow.plan.packed.program import Floats, Log, Program, Solution, SolverStatus, answer

GRACE_S = 5.0  # past the limit, before CBC is killed
NUMBER = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
BOUND = re.compile(rf"^Lower bound:\s+{NUMBER}|best possible {NUMBER}", re.MULTILINE)


class Cbc:
    """Integer programs by branch and cut."""

    def refuses(self, program: Program) -> str | None:  # noqa: ARG002 (it takes every program)
        return None if _binary() is not None else "PuLP brings no CBC for this machine"

    def solve(
        self, program: Program, *, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
    ) -> Solution:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="checkflow-cbc-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            _write(program, folder / "model.mps")
            command = [str(_binary()), str(folder / "model.mps"), "-timeMode", "elapsed"]
            command += ["-ratioGap", "0", "-allowableGap", "1e-6", "-primalTolerance", "1e-9"]
            if warm_start is not None:
                _write_start(warm_start, folder / "start")
                command += ["-mips", str(folder / "start")]
            left_s = None if time_limit_s is None else max(0.01, time_limit_s - (time.monotonic() - began))
            if left_s is not None:
                command += ["-sec", str(left_s)]
            command += ["-solve", "-printingOptions", "all", "-solution", str(folder / "solution")]
            text = _run(command, folder / "log", None if left_s is None else left_s + GRACE_S)
            if log is not None:
                for line in text.splitlines():
                    log(line)
            status, found = _read(program, folder / "solution", text)
        bounds = [float(one or other) for one, other in BOUND.findall(text)]
        bound = max(bounds, default=-np.inf)
        if status is SolverStatus.OPTIMAL and found is not None:
            bound = float(program.objective @ found)
        return answer(program, status, found, bound, time.monotonic() - began, "cbc")


@cache
def _binary() -> Path | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PuLP announces its version 4, which brings no CBC
        command = pulp.PULP_CBC_CMD(msg=False)
        return Path(command.path) if command.available() else None


def _write(program: Program, path: Path) -> None:
    """HiGHS writes MPS files far faster than PuLP; columns are called c0, c1, ..."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    lp = highs_model(program)
    lp.col_names_ = [f"c{column}" for column in range(program.columns)]
    highs.passModel(lp)
    if highs.writeModel(str(path)) == highspy.HighsStatus.kError:
        raise SolverError(f"solver cbc: its model cannot be written to {path}; free some space there")


def _write_start(x: Floats, path: Path) -> None:
    rows = (f"{column} c{column} {value!r} 0\n" for column, value in enumerate(x.tolist()))
    path.write_text("Stopped on time - objective value 0\n" + "".join(rows))


def _run(command: list[str], log: Path, patience_s: float | None) -> str:
    with log.open("wb") as said:
        start = partial(subprocess.Popen[bytes], command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        with killed_at_the_end(start) as process, suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    return log.read_text(errors="replace")


def _read(program: Program, path: Path, text: str) -> tuple[SolverStatus, Floats | None]:
    """Status and point from CBC's solution file, whose first line says what it is."""
    if not path.exists():  # killed, or it stopped by itself: only the former is a time limit
        if "Stopped on" in text or "Cbc" not in text or "Result" not in text:
            return SolverStatus.TIMED_OUT, None
        raise SolverError(f"solver cbc: {text.strip().splitlines()[-1]}; choose another solver")
    first, *rows = path.read_text().splitlines()
    if first.startswith(("Infeasible", "Integer infeasible")):
        return SolverStatus.INFEASIBLE, None
    if first.startswith("Optimal"):
        status = SolverStatus.OPTIMAL
    elif first.startswith("Stopped") and "no integer solution" not in first:
        status = SolverStatus.FEASIBLE
    elif first.startswith("Stopped"):
        return SolverStatus.TIMED_OUT, None
    else:
        raise SolverError(f"solver cbc: stopped with {first!r}; choose another solver")
    x = np.zeros(program.columns)
    for row in rows:
        words = row.replace("**", " ").split()
        if words[1].startswith("c"):
            x[int(words[1][1:])] = float(words[2])
    return status, x


BACKEND = Cbc()
