"""HiGHS on a thread of this process, and the program as HiGHS takes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import highspy
import numpy as np

from checkflow.errors import SolverError
from checkflow.plan.packed.program import Floats, Log, Program, Solution, SolverStatus, answer

GRACE_S = 0.5  # past the limit, before the solver is asked to stop

STATUSES = {
    highspy.HighsModelStatus.kOptimal: SolverStatus.OPTIMAL,
    highspy.HighsModelStatus.kModelEmpty: SolverStatus.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: SolverStatus.INFEASIBLE,
    highspy.HighsModelStatus.kUnboundedOrInfeasible: SolverStatus.INFEASIBLE,  # programs here are bounded below
    highspy.HighsModelStatus.kTimeLimit: SolverStatus.FEASIBLE,
    highspy.HighsModelStatus.kInterrupt: SolverStatus.FEASIBLE,
}
OPTIONS: dict[str, float] = {
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-6,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
}

Progress = Callable[[Floats | None, float], None]  # told each better x, and the bound now and then


def solve_here(
    program: Program,
    time_limit_s: float | None,
    warm_start: Floats | None,
    log: Log | None,
    progress: Progress | None = None,
) -> Solution:
    """Solve on a thread of this process, so that Ctrl-C and the time limit reach the solver."""
    began = time.monotonic()
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", log is not None)
    highs.setOptionValue("log_to_console", False)
    for name, value in OPTIONS.items():
        highs.setOptionValue(name, value)
    if time_limit_s is not None:
        highs.setOptionValue("time_limit", float(time_limit_s))
    if log is not None:
        highs.cbLogging += lambda event: log(event.message.rstrip())
    if progress is not None:
        highs.cbMipImprovingSolution += lambda event: progress(
            np.array(event.data_out.mip_solution), event.data_out.mip_dual_bound
        )
        highs.cbMipLogging += lambda event: progress(None, event.data_out.mip_dual_bound)
    if highs.passModel(highs_model(program)) == highspy.HighsStatus.kError:
        raise SolverError("solver highs: refused the model; choose another solver")
    if warm_start is not None:
        start = highspy.HighsSolution()
        start.col_value = [float(value) for value in warm_start]
        highs.setSolution(start)
    _run(highs, None if time_limit_s is None else began + time_limit_s + GRACE_S)
    return _solution(highs, program, time.monotonic() - began)


def highs_model(program: Program) -> highspy.HighsLp:
    """The program as HiGHS takes it."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = program.columns, program.rows
    lp.col_cost_ = program.objective
    lp.col_lower_, lp.col_upper_ = program.lower, program.upper
    lp.row_lower_, lp.row_upper_ = program.row_lower, program.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = program.columns, program.rows
    lp.a_matrix_.start_ = program.matrix.indptr.astype(np.int32)
    lp.a_matrix_.index_ = program.matrix.indices.astype(np.int32)
    lp.a_matrix_.value_ = program.matrix.data.astype(np.float64)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    if program.integral.any():
        lp.integrality_ = [kinds[integral] for integral in program.integral.tolist()]
    return lp


def _run(highs: highspy.Highs, deadline: float | None) -> None:
    highs.HandleUserInterrupt = True
    highs.startSolve()
    try:
        while not highs.wait(0.1)[0]:
            if deadline is not None and time.monotonic() > deadline:
                highs.cancelSolve()
    except KeyboardInterrupt:
        highs.cancelSolve()
        highs.wait(5.0)  # a solver that does not answer is left to its daemon thread
        raise


def _solution(highs: highspy.Highs, program: Program, wall_s: float) -> Solution:
    status = STATUSES.get(highs.getModelStatus())
    if status is None:
        said = highs.modelStatusToString(highs.getModelStatus())
        raise SolverError(f"solver highs: stopped with {said!r}; choose another solver")
    info = highs.getInfo()
    if status is SolverStatus.FEASIBLE and info.primal_solution_status != highspy.kSolutionStatusFeasible:
        status = SolverStatus.TIMED_OUT
    if program.integral.any():
        bound = float(info.mip_dual_bound)
    else:
        bound = float(info.objective_function_value) if status is SolverStatus.OPTIMAL else -np.inf
    return answer(program, status, np.array(highs.getSolution().col_value), bound, wall_s, "highs")
