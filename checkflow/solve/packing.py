"""One set of chunks, packed into steps: the constructive plan, and a solver where it does not meet the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from checkflow.errors import SolverError
from checkflow.plan import Chunk, Formulation, Plan, Problem, ProvenBy, SolverRun, Transfers
from checkflow.solve.bounds import chunks_can_fit
from checkflow.solve.constructive import Constructed, construct
from checkflow.solve.formulations import compact, direct_packed, paper
from checkflow.solve.packed import peak_bytes, period
from checkflow.solve.program import Status, choose

MOST_COLUMNS = 10_000_000  # of the literal model; beyond, its matrix alone takes gigabytes
BUILD = {Formulation.PAPER: paper.build, Formulation.COMPACT: compact.build, Formulation.DIRECT: direct_packed.build}
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

    `paper` always asks the solver and gives it no warm start: the literal model is what it measures. `bound_bytes` is
    bounds.least_peak_bytes. Raises SolverError where the solver cannot run.
    """
    if not chunks_can_fit(problem, chunks, formulation):
        return Unpacked.IMPOSSIBLE
    start = None if formulation is Formulation.PAPER else construct(problem, chunks, formulation, bound_bytes)
    if start is not None and (start.peak_bytes == bound_bytes or time_limit_s <= 0.0):
        return _plan(formulation, start, bound_bytes, bound_bytes, NO_SOLVER, start)
    if time_limit_s <= 0.0:
        return Unpacked.UNDECIDED
    if formulation is Formulation.PAPER and 4 * len(chunks) * period(problem) > MOST_COLUMNS:
        raise SolverError(
            f"formulation paper: {4 * len(chunks) * period(problem)} variables are more than {MOST_COLUMNS}; give "
            "larger chunks, or --formulation compact for the same optimum"
        )
    model = BUILD[formulation](problem, chunks)
    program = model.program
    if formulation is not Formulation.PAPER:  # the literal model is left as the paper has it
        lowest = program.lower.copy()
        lowest[-1] = (bound_bytes - model.base_bytes) / model.unit_bytes  # of the peak: where to stop looking
        program = replace(program, lower=lowest)
    choice = choose(program, solver)
    progress(f"{choice.name}: {program.columns} variables, {program.rows} constraints")
    solution = choice.backend.solve(
        program,
        time_limit_s=time_limit_s,
        warm_start=None if start is None else model.encode(start.transfers),
        log=None,
    )
    run = SolverRun(choice.name, choice.why, solution.wall_s, program.columns, program.rows)
    if solution.status is Status.INFEASIBLE:
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
    if solution.status is Status.OPTIMAL and best.peak_bytes <= model.bytes_of(solution.objective) + tolerance:
        lower = best.peak_bytes
    return _plan(formulation, best, lower, bound_bytes, run, start)


def _plan(
    formulation: Formulation,
    best: Constructed,
    lower_bytes: int,
    bound_bytes: int,
    run: SolverRun,
    start: Constructed | None,
) -> Plan:
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
