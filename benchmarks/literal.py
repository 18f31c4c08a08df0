"""The paper's literal integer program (Eqs 1-12) against ours, on the same solver, in the same process.

Both plan the same chunks in the paper's semantics: `paper` has all of C, P, S and alpha, `compact` bounds, a
constructed plan and, where they do not meet, a program of counts. The peaks have to be equal to the byte wherever the
literal program is solved to its end; where its time runs out, ours has to lie between its bound and its best plan.

    python benchmarks/literal.py [--limit 300] [--chunk 4MiB] [--solver highs] [--networks ...] [--batches ...] ...
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median

from cells import BANDWIDTH, arguments, cells, mib
from rich.console import Console
from rich.table import Table

from checkflow.errors import SolverError
from checkflow.plan import Formulation, Infeasible, Plan, Problem, Transfers, problem_of
from checkflow.plan.packed.packing import MOST_COLUMNS
from checkflow.plan.solve import solve
from checkflow.units import parse_bytes

LONG_S = 10.0  # cells in which the literal program takes at least this count for the ratio


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the literal program, each cell")
    parser.add_argument("--solver", default="highs")
    parser.add_argument("--chunk", help="largest chunk for both, like 4MiB (default: what ours chooses)")
    chosen = parser.parse_args()
    chunk_bytes = parse_bytes(chosen.chunk, "--chunk") if chosen.chunk else None
    table = Table(
        "cell", "chunk KiB", "chunks", "ours s", "literal s", "ratio", "ours +MiB", "literal +MiB", "peaks", box=None
    )
    ratios, wrong = [], 0
    for cell in cells(chosen):
        problem = problem_of(cell.graph, bandwidth_bytes_per_s=BANDWIDTH, chunk_bytes=chunk_bytes)
        ours, ours_s = _timed(problem, Formulation.COMPACT, chosen.solver, chosen.limit)
        while isinstance(ours, Plan):
            largest = max(t.chunk.size_bytes for t in ours.transfers)
            problem = replace(problem, chunk_bytes=problem.chunk_bytes or largest)
            if 4 * len(ours.transfers) * problem.steps <= MOST_COLUMNS:
                break
            problem = replace(problem, chunk_bytes=2 * largest)  # the literal program of smaller ones cannot be built
            ours, ours_s = _timed(problem, Formulation.COMPACT, chosen.solver, chosen.limit)
        literal, literal_s = _timed(problem, Formulation.PAPER, chosen.solver, chosen.limit)
        if literal_s >= LONG_S:
            ratios.append(literal_s / ours_s)
        agreement = _agreement(ours, literal)
        wrong += agreement == "DIFFER"
        row = (
            str(cell),
            f"{(problem.chunk_bytes or 0) / 1024:.0f}",
            str(len(ours.transfers)) if isinstance(ours, Plan) else "",
            f"{ours_s:.3f}",
            f"{literal_s:.1f}",
            f"{literal_s / ours_s:.0f}",
            _extra(ours, problem),
            _extra(literal, problem),
            agreement,
        )
        print("  ".join(row), file=sys.stderr, flush=True)
        table.add_row(*row)
    Console(width=150).print(table)
    if ratios:
        print(f"literal takes {LONG_S:g} s or more in {len(ratios)} cells: median ratio {median(ratios):.0f}")
    print(f"cells whose peaks differ: {wrong}")


def _timed(
    problem: Problem, formulation: Formulation, solver: str, limit_s: float
) -> tuple[Plan | Infeasible | None, float]:
    began = time.perf_counter()
    try:
        answer = solve(problem, formulation, Transfers.PACKED, solver=solver, time_limit_s=limit_s)
    except SolverError:
        answer = None  # time ran out with neither a plan nor a proof
    return answer, time.perf_counter() - began


def _extra(answer: Plan | Infeasible | None, problem: Problem) -> str:
    if answer is None:
        return "no plan in time"
    if isinstance(answer, Infeasible):
        return f"infeasible: {answer.reason}"
    return mib(answer.peak_bytes - problem.training_peak_bytes) + (
        "" if answer.gap == 0 else f" (gap {answer.gap:.1e})"
    )


def _agreement(ours: Plan | Infeasible | None, literal: Plan | Infeasible | None) -> str:
    if isinstance(ours, Infeasible) and isinstance(literal, Infeasible):
        return "both infeasible" if ours.reason is literal.reason else "DIFFER"
    if not isinstance(ours, Plan) or not isinstance(literal, Plan):
        return "literal unsolved" if literal is None else "DIFFER"
    if ours.gap == literal.gap == 0:
        return "equal" if ours.peak_bytes == literal.peak_bytes else "DIFFER"
    between = literal.lower_bound_bytes <= ours.peak_bytes and ours.lower_bound_bytes <= literal.peak_bytes
    return "consistent, literal out of time" if between else "DIFFER"


if __name__ == "__main__":
    main()
