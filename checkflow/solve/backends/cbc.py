"""CBC, through PuLP. PuLP writes the model as text, so models of a million entries take long to hand over."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pulp

from checkflow.errors import SolverError
from checkflow.solve.program import Floats, Log, Program, Solution, Status, answer

BOUND = re.compile(r"^Lower bound:\s+(\S+)|best possible (\S+?),?(?:\s|$)", re.MULTILINE)


class Cbc:
    """Integer programs by branch and cut, in a process of its own."""

    def refuses(self, program: Program) -> str | None:  # noqa: ARG002 (it takes every program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PuLP announces its version 4, which drops the bundled CBC
            there = pulp.PULP_CBC_CMD(msg=False).available()
        return None if there else "PuLP brings no CBC for this machine"

    def solve(
        self, program: Program, *, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
    ) -> Solution:
        began = time.monotonic()
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="checkflow-cbc-") as folder:
            warnings.simplefilter("ignore")
            problem, columns = _model(program)
            if warm_start is not None:
                for column, value in zip(columns, warm_start.tolist(), strict=True):
                    column.setInitialValue(value)
            log_file = Path(folder) / "log"
            left_s = None if time_limit_s is None else max(0.01, time_limit_s - (time.monotonic() - began))
            command = pulp.PULP_CBC_CMD(
                msg=False,
                timeLimit=left_s,
                gapRel=0.0,
                gapAbs=1e-6,
                warmStart=warm_start is not None,
                logPath=str(log_file),
                options=["primalTolerance 1e-9", "integerTolerance 1e-9"],
            )
            command.tmpDir = folder  # so that an interrupt leaves no file behind
            try:
                problem.solve(command)
            except pulp.PulpSolverError as error:
                raise SolverError(f"solver cbc: {str(error).splitlines()[0]}; choose another solver") from None
            text = log_file.read_text(errors="replace")
        if log is not None:
            for line in text.splitlines():
                log(line)
        status = _status(problem, text)
        found = np.array([column.value() or 0.0 for column in columns])
        value = float(program.objective @ found)
        bounds = [float(one or other) for one, other in BOUND.findall(text)]
        bound = value if status is Status.OPTIMAL else max(bounds, default=-np.inf)
        return answer(program, status, found, bound, time.monotonic() - began, "cbc")


def _model(program: Program) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("checkflow", pulp.LpMinimize)
    columns = [
        pulp.LpVariable(f"x{i}", None if lower == -np.inf else lower, None if upper == np.inf else upper, kind)
        for i, (lower, upper, kind) in enumerate(
            zip(
                program.lower.tolist(),
                program.upper.tolist(),
                np.where(program.integral, pulp.LpInteger, pulp.LpContinuous).tolist(),
                strict=True,
            )
        )
    ]
    problem.setObjective(pulp.LpAffineExpression(zip(columns, program.objective.tolist(), strict=True)))
    starts, index, values = program.matrix.indptr, program.matrix.indices.tolist(), program.matrix.data.tolist()
    for row, (lower, upper) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        entries = range(starts[row], starts[row + 1])
        terms = [(columns[index[at]], values[at]) for at in entries]
        if lower == upper:
            problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, rhs=upper))
            continue
        if upper != np.inf:
            problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintLE, rhs=upper))
        if lower != -np.inf:
            problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintGE, rhs=lower))
    return problem, columns


def _status(problem: pulp.LpProblem, text: str) -> Status:
    """PuLP says "optimal" of a search cut short as well; its solution status tells them apart."""
    if problem.status == pulp.LpStatusInfeasible:
        return Status.INFEASIBLE
    if problem.sol_status == pulp.LpSolutionOptimal and "Stopped on" not in text:
        return Status.OPTIMAL
    if problem.sol_status in (pulp.LpSolutionIntegerFeasible, pulp.LpSolutionOptimal):
        return Status.FEASIBLE
    if problem.status in (pulp.LpStatusNotSolved, pulp.LpStatusUndefined):
        return Status.TIMED_OUT
    raise SolverError(f"solver cbc: stopped with {pulp.LpStatus[problem.status]!r}; choose another solver")


BACKEND = Cbc()
