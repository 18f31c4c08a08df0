"""Gurobi, through its matrix API. The free licence that pip installs covers 2000 variables and 2000 constraints."""

from __future__ import annotations

import time
from functools import cache

import gurobipy as gp
import numpy as np

from checkflow.errors import SolverError
from checkflow.plan.packed.program import Floats, Log, Program, Solution, SolverStatus, answer

FREE_LIMIT = 2000
SIZE_LIMIT_EXCEEDED = 10010  # GRB.Error.SIZE_LIMIT_EXCEEDED
OPTIONS = {"MIPGap": 0.0, "MIPGapAbs": 1e-6, "FeasibilityTol": 1e-9, "IntFeasTol": 1e-9}


class Gurobi:
    """Integer programs by branch and cut, where a licence allows."""

    def refuses(self, program: Program) -> str | None:
        refusal, covers_all = licence()
        if refusal is not None:
            return refusal
        rows = _rows(program)
        if covers_all or (program.columns <= FREE_LIMIT and rows <= FREE_LIMIT):
            return None
        return (
            f"the free licence covers {FREE_LIMIT} variables and {FREE_LIMIT} constraints, "
            f"the model has {program.columns} and {rows}"
        )

    def solve(
        self, program: Program, *, time_limit_s: float | None, warm_start: Floats | None, log: Log | None
    ) -> Solution:
        began = time.monotonic()
        try:
            with _environment(log) as environment, gp.Model(env=environment) as model:
                return self._solve(model, program, began, time_limit_s, warm_start, log)
        except gp.GurobiError as error:
            raise SolverError(f"solver gurobi: {_line(error)}; choose another solver") from None

    def _solve(
        self,
        model: gp.Model,
        program: Program,
        began: float,
        time_limit_s: float | None,
        warm_start: Floats | None,
        log: Log | None,
    ) -> Solution:
        x = model.addMVar(
            program.columns,
            lb=program.lower,
            ub=program.upper,
            obj=program.objective,
            vtype=np.where(program.integral, "I", "C"),
        )
        lower, upper = program.row_lower, program.row_upper
        for chosen, sense, side in (
            (lower == upper, "=", upper),
            (np.isfinite(upper) & (lower < upper), "<", upper),
            (np.isfinite(lower) & (lower < upper), ">", lower),
        ):
            if chosen.any():
                model.addMConstr(program.matrix[np.flatnonzero(chosen)], x, sense, side[chosen])  # type: ignore[call-overload]
        for name, value in OPTIONS.items():
            model.setParam(name, value)
        if time_limit_s is not None:
            model.setParam("TimeLimit", max(0.0, float(time_limit_s)))
        if warm_start is not None:
            x.setAttr("Start", warm_start)
        if log is None:
            model.optimize()
        else:
            model.optimize(lambda model, where: _relay(model, where, log))
        if model.Status == gp.GRB.INTERRUPTED:
            raise KeyboardInterrupt
        status = {
            gp.GRB.OPTIMAL: SolverStatus.OPTIMAL,
            gp.GRB.INFEASIBLE: SolverStatus.INFEASIBLE,
            gp.GRB.INF_OR_UNBD: SolverStatus.INFEASIBLE,  # programs here are bounded below
            gp.GRB.TIME_LIMIT: SolverStatus.FEASIBLE if model.SolCount else SolverStatus.TIMED_OUT,
        }.get(model.Status)
        if status is None:
            raise SolverError(f"solver gurobi: stopped with status {model.Status}; choose another solver")
        bound = float(model.ObjBound) if program.integral.any() or status is SolverStatus.OPTIMAL else -np.inf
        found = np.array(x.X) if model.SolCount else None
        return answer(program, status, found, bound, time.monotonic() - began, "gurobi")


@cache
def licence() -> tuple[str | None, bool]:
    """(why Gurobi cannot run or None, whether models of any size are covered), found by trying. Done once."""
    try:
        with _environment(None) as environment, gp.Model(env=environment) as model:
            model.addMVar(FREE_LIMIT + 1)
            model.optimize()
    except gp.GurobiError as error:
        return (None, False) if error.errno == SIZE_LIMIT_EXCEEDED else (_line(error), False)
    return None, True


def _environment(log: Log | None) -> gp.Env:
    """An environment that prints nothing, the licence's banner included."""
    environment = gp.Env(empty=True)
    environment.setParam("LogToConsole", 0)
    environment.setParam("OutputFlag", 0 if log is None else 1)
    environment.start()
    return environment


def _relay(model: gp.Model, where: int, log: Log) -> None:
    if where == gp.GRB.Callback.MESSAGE:
        log(str(model.cbGet(gp.GRB.Callback.MSG_STRING)).rstrip())


def _rows(program: Program) -> int:
    """Constraints as Gurobi counts them: a range is two."""
    ranges = np.isfinite(program.row_lower) & np.isfinite(program.row_upper) & (program.row_lower < program.row_upper)
    return program.rows + int(ranges.sum())


def _line(error: gp.GurobiError) -> str:
    return str(error).strip().splitlines()[0]


BACKEND = Gurobi()
