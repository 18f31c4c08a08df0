"""An integer program as sparse arrays, what a solver says about it, and which solver to ask.

A solver is a file in `backends/` with a `BACKEND` in it; the file's name is the solver's.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from checkflow.errors import SolverError
from checkflow.missing import not_installed
from checkflow.text import brief

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Log = Callable[[str], None]

PREFERENCE = ("gurobi", "highs", "cbc")  # what `auto` tries, in order


@dataclass(frozen=True)
class Program:
    """Minimize objective·x subject to row_lower <= matrix·x <= row_upper and lower <= x <= upper.

    Infinite bounds are ±inf; the objective is bounded below wherever there is an x. `integral` marks the integer
    columns. `families` names runs of rows by the equation they come from.
    """

    objective: Floats  # (columns,)
    lower: Floats  # (columns,)
    upper: Floats  # (columns,)
    integral: npt.NDArray[np.bool_]  # (columns,)
    matrix: sp.csr_array  # (rows, columns)
    row_lower: Floats  # (rows,)
    row_upper: Floats  # (rows,)
    families: Mapping[str, slice] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def columns(self) -> int:
        return len(self.objective)

    @property
    def rows(self) -> int:
        return len(self.row_lower)

    def admits(self, x: Floats, tolerance: float = 1e-6) -> bool:
        """Whether x satisfies every row, bound and integrality, each within the tolerance."""
        activity = self.matrix @ x
        return bool(
            np.all(x >= self.lower - tolerance)
            and np.all(x <= self.upper + tolerance)
            and np.all(np.abs(x - np.rint(x))[self.integral] <= tolerance)
            and np.all(activity >= self.row_lower - tolerance)
            and np.all(activity <= self.row_upper + tolerance)
        )


class SolverStatus(StrEnum):
    """What is known about the program once the solver returns. `optimal` is never said of a search cut short."""

    OPTIMAL = "optimal"  # x is best, proven
    FEASIBLE = "feasible"  # x is what was found before time ran out
    TIMED_OUT = "timed_out"  # time ran out before any x was found
    INFEASIBLE = "infeasible"  # no x exists, proven


@dataclass(frozen=True)
class Solution:
    """A solver's answer. `x` is there for optimal and feasible; `bound` is a proven lower bound on the objective."""

    status: SolverStatus
    objective: float  # of x; inf without one
    bound: float  # -inf where the solver gives none
    x: Floats | None  # (columns,), integer columns rounded
    wall_s: float


class OutOfTime(Exception):
    """The time limit passed before a solver could begin; nothing is known."""


def in_time(deadline: float) -> None:
    """Raises OutOfTime once time.monotonic() is past the deadline."""
    if time.monotonic() > deadline:
        raise OutOfTime


class Backend(Protocol):
    """One solver."""

    def refuses(self, program: Program) -> str | None:
        """Why it cannot take this program, in one line; None where it can."""

    def solve(
        self, program: Program, *, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
    ) -> Solution:
        """Solve to a gap of zero. Raises SolverError where the solver fails; Ctrl-C stops it and propagates."""


@dataclass(frozen=True)
class Choice:
    """The solver to use, and why it is this one."""

    name: str
    why: str
    backend: Backend


def solvers() -> tuple[str, ...]:
    """The names of all solvers."""
    from checkflow.plan.packed import backends

    return tuple(sorted(module.name for module in pkgutil.iter_modules(backends.__path__) if module.name[0] != "_"))


def choose(program: Program, solver: str = "auto") -> Choice:
    """The solver for a program. Raises SolverError where the one asked for does not exist or cannot take it.

    `auto` is the first of PREFERENCE that is there and can take the program; `why` names those before it.
    """
    if solver != "auto":
        if solver not in solvers():
            raise SolverError(f"solver: {solver!r} is unknown; choose auto, {', '.join(solvers())}")
        backend = _able(solver, program)
        if isinstance(backend, str):
            raise SolverError(f"solver {solver}: {backend}; choose another or auto")
        return Choice(solver, "asked for by name", backend)
    refusals: list[str] = []
    for name in PREFERENCE:
        backend = _able(name, program)
        if not isinstance(backend, str):
            return Choice(name, "; ".join(refusals) or "first choice, and it can take the model", backend)
        refusals.append(f"{name}: {backend}")
    raise SolverError(f"no solver can run ({'; '.join(refusals)}); install highspy")


def _able(name: str, program: Program) -> Backend | str:
    """The solver, or why it cannot take the program: one that cannot be imported is as one without a licence."""
    try:
        backend: Backend = importlib.import_module(f"checkflow.plan.packed.backends.{name}").BACKEND
    except ImportError as error:
        return not_installed(error) or f"cannot be imported ({brief(error)})"
    return backend.refuses(program) or backend


def answer(
    program: Program, status: SolverStatus, x: Floats | None, bound: float, wall_s: float, source: str
) -> Solution:
    """A Solution from what a solver reports: integers rounded, the rounded point checked against every row.

    Raises SolverError where the point breaks a row once its integers are exact.
    """
    if x is None or status in (SolverStatus.TIMED_OUT, SolverStatus.INFEASIBLE):
        return Solution(status, np.inf, np.inf if status is SolverStatus.INFEASIBLE else bound, None, wall_s)
    x = np.where(program.integral, np.rint(x), x)
    scale = max(1.0, float(np.max(np.abs(x), initial=0.0)))
    if not program.admits(x, tolerance=1e-6 * scale):
        raise SolverError(f"solver {source}: its solution breaks a constraint once rounded; choose another solver")
    return Solution(status, float(program.objective @ x), bound, x, wall_s)
