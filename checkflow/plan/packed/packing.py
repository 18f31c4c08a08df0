"""One set of chunks, packed into steps: the constructive plan, and a solver where it does not meet the bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from checkflow.errors import SolverError
from checkflow.plan import Chunk, Formulation, Plan, Problem, ProvenBy, SolverRun, Transfers
from checkflow.plan.packed.bounds import chunks_can_fit
from checkflow.plan.packed.constructive import Constructed, construct
from checkflow.plan.packed.formulations import compact, direct_packed, paper
from checkflow.plan.packed.program import OutOfTime, SolverStatus, choose, in_time
from checkflow.plan.packed.steps import Model, peak_bytes, period
from checkflow.spelling import option

MOST_COLUMNS = 10_000_000  # of the literal model; beyond, its matrix alone takes gigabytes
BUILD = {Formulation.COMPACT: compact.build, Formulation.DIRECT: direct_packed.build}
NO_SOLVER = SolverRun("none", "the plan was constructed")


class Unpacked(Enum):
    """Why there is no plan of these chunks."""

    IMPOSSIBLE = auto()  # proven
    UNDECIDED = auto()  # time ran out


def pack(
    problem: Problem,
    chunks: tuple[Chunk, ...],
    formulation: Formulation,
    bound_bytes: int,
    *,
    solver: str = "auto",
    time_limit_s: float = 300.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan | Unpacked:
    """The plan of least peak that moves exactly these chunks; the memory limit plays no part.

    The time limit is for all of it: what building a model takes is not left to its solver.
    `paper` always asks the solver and gives it no warm start: the literal model is what it measures. `bound_bytes` is
    bounds.least_peak_bytes. Raises SolverError where the solver cannot run.
    """
    deadline = time.monotonic() + time_limit_s
    if not chunks_can_fit(problem, chunks, formulation):
        return Unpacked.IMPOSSIBLE
    start = None if formulation is Formulation.PAPER else construct(problem, chunks, formulation, bound_bytes)
    if start is not None and (start.peak_bytes == bound_bytes or time_limit_s <= 0.0):
        return plan_of(formulation, start, bound_bytes, bound_bytes, NO_SOLVER, start)
    if time_limit_s <= 0.0:
        return Unpacked.UNDECIDED
    if formulation is Formulation.PAPER and 4 * len(chunks) * period(problem) > MOST_COLUMNS:
        raise SolverError(
            f"{option('formulation', 'paper')}: {4 * len(chunks) * period(problem)} variables are more than "
            f"{MOST_COLUMNS}; give larger chunks, or {option('formulation', 'compact')} for the same optimum"
        )
    try:
        model = _model(problem, chunks, formulation, bound_bytes, deadline)
        choice = choose(model.program, solver)
        size = f"{model.program.columns} variables, {model.program.rows} constraints"
        progress(f"{choice.name}: {size}, within {max(0.0, deadline - time.monotonic()):.0f} s")
        in_time(deadline)
        solution = choice.backend.solve(
            model.program,
            time_limit_s=deadline - time.monotonic(),
            warm_start=None if start is None else model.encode(start.transfers),
            log=None,
        )
    except OutOfTime:
        return (
            Unpacked.UNDECIDED
            if start is None
            else plan_of(formulation, start, bound_bytes, bound_bytes, NO_SOLVER, start)
        )
    run = SolverRun(choice.name, choice.why, solution.wall_s, model.program.columns, model.program.rows)
    if solution.status is SolverStatus.INFEASIBLE:
        if start is not None:
            raise SolverError(f"solver {choice.name}: finds a model infeasible that has a plan; choose another solver")
        return Unpacked.IMPOSSIBLE
    best = start
    if solution.x is not None:
        transfers = model.decode(solution.x)
        peak = peak_bytes(problem, transfers, formulation)
        if peak is None:
            raise SolverError(f"solver {choice.name}: its plan breaks Eq 9 once counted exactly; choose another solver")
        if best is None or peak < best.peak_bytes:
            best = Constructed(transfers, peak)
    if best is None:
        return Unpacked.UNDECIDED
    lower = min(best.peak_bytes, max(bound_bytes, model.bytes_of(solution.bound)))
    tolerance = 1 + model.unit_bytes // 100_000  # of the solver, in bytes
    if solution.status is SolverStatus.OPTIMAL and best.peak_bytes <= model.bytes_of(solution.objective) + tolerance:
        lower = best.peak_bytes
    return plan_of(formulation, best, lower, bound_bytes, run, start)


def _model(
    problem: Problem, chunks: tuple[Chunk, ...], formulation: Formulation, bound_bytes: int, deadline: float
) -> Model:
    """The integer program; it knows where to stop looking. The literal one is left as the paper has it."""
    if formulation is Formulation.PAPER:
        return paper.build(problem, chunks, deadline)
    model = BUILD[formulation](problem, chunks)
    lowest = model.program.lower.copy()
    lowest[-1] = (bound_bytes - model.base_bytes) / model.unit_bytes
    return replace(model, program=replace(model.program, lower=lowest))


def plan_of(
    formulation: Formulation,
    best: Constructed,
    lower_bytes: int,
    bound_bytes: int,
    run: SolverRun,
    start: Constructed | None,
) -> Plan:
    """The plan that consists of a set of transfers, with what is known about it."""
    return Plan(
        formulation=formulation,
        transfers_kind=Transfers.PACKED,
        transfers=best.transfers,
        peak_bytes=best.peak_bytes,
        lower_bound_bytes=lower_bytes,
        proven_by=ProvenBy.BOUND if lower_bytes <= bound_bytes else ProvenBy.MILP,  # whoever found the plan
        solver=run,
        constructive_peak_bytes=None if start is None else start.peak_bytes,
    )
