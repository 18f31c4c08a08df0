"""Every cell of the evaluation, planned: how long it takes, how far from the bound, and what it adds.

Beside it the paper's optimum (formulation compact, the same optimum as Eqs 1-12) and CheckFreq's whole-state snapshot.
Interval 1 where it is feasible; where it is not, the reason, and the smallest interval that is. "In time": the link
carries the whole state before its deadlines, so that nothing has to be snapshot. "Certified" is what runs, at the
anchors that there are; "ideal" is what no plan can do without, if there were one between any two operators.

    python benchmarks/plans.py [--networks alexnet,bert] [--batches 1,32] [--optimizers sgd,adamw] [--no-paper]
"""

from __future__ import annotations

from statistics import median

from cells import BANDWIDTH, arguments, cells, mib
from rich.console import Console
from rich.table import Table

from checkflow.compiler import Compiled, Options, Refused, compile_graph
from checkflow.plan import Formulation, Transfers
from checkflow.policies.checkfreq import at_best

COLUMNS = (
    "cell", "iter ms", "state MiB", "link use", "interval 1", "k", "trace s", "plan s", "gap",
    "training peak MiB", "+ideal", "in time", "+certified", "+paper's optimum", "paper gap", "paper s", "+CheckFreq",
    "saved of CheckFreq's peak",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's optimum out")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each solve of the paper's optimum")
    chosen = parser.parse_args()
    table = Table(*COLUMNS, box=None)
    plan_s, trace_s, gaps, saved, missing, added_in_time, never_more = [], [], [], [], [], [], True
    cut: list[str] = []  # cells where time ran out before the paper's optimum was proven
    for cell in cells(chosen):
        graph = cell.graph
        first = compile_graph(graph, Options(BANDWIDTH))
        result = first if isinstance(first, Compiled) else compile_graph(graph, Options(BANDWIDTH, interval=None))
        assert isinstance(result, Compiled)
        certificate, problem = result.schedule.certificate, result.problem
        training = certificate.training_peak_bytes
        checkfreq = at_best(problem).peak_bytes
        paper = None if chosen.no_paper else _paper(result, chosen.limit)
        plan_s.append(first.plan_s)
        trace_s.append(cell.trace_s)
        assert certificate.gap is not None and certificate.ideal_peak_bytes is not None
        assert certificate.lower_bound_bytes is not None
        gaps.append(certificate.gap)
        saved.append(1 - certificate.peak_bytes / checkfreq)
        missing.append(certificate.lower_bound_bytes - certificate.ideal_peak_bytes)
        if certificate.snapshot_bytes == 0:
            added_in_time.append(certificate.peak_bytes - training)
        if isinstance(paper, Compiled):
            never_more &= certificate.peak_bytes <= paper.plan.peak_bytes
            if paper.plan.gap:
                cut.append(f"{cell} (gap {paper.plan.gap:.1e})")
        table.add_row(
            str(cell),
            f"{graph.iteration_time_ns / 1e6:.2f}",
            mib(problem.state_bytes),
            f"{problem.state_bytes * 1e9 / (BANDWIDTH * problem.interval * graph.iteration_time_ns):.0%}",
            "yes" if isinstance(first, Compiled) else f"no: {first.answer.reason}",
            str(problem.interval),
            f"{cell.trace_s:.2f}",
            f"{first.plan_s:.3f}",
            f"{certificate.gap:.1e}" if certificate.gap else "0",
            mib(training),
            mib(certificate.ideal_peak_bytes - training),
            "" if certificate.snapshot_bytes else "yes",
            mib(certificate.peak_bytes - training),
            *_columns(paper, training),
            mib(checkfreq - training),
            f"{saved[-1]:.1%}",
        )
    Console(width=230).print(table)
    print(f"trace: median {median(trace_s):.2f} s, longest {max(trace_s):.2f} s")
    print(f"plan: median {median(plan_s):.3f} s, longest {max(plan_s):.3f} s; largest gap {max(gaps):.1e}")
    print(f"more than ideal, for want of anchors: in {sum(map(bool, missing))} cells, at most {max(missing)} bytes")
    print(
        f"the link carries the state before its deadlines in {len(added_in_time)} cells; most bytes added to the "
        f"training peak in them: {max(added_in_time, default=0)}"
    )
    print(f"saved of CheckFreq's peak: mean {sum(saved) / len(saved):.1%}, largest {max(saved):.1%}")
    if not chosen.no_paper:
        print(f"never needs more than the paper's optimum: {never_more}")
        print(
            f"the paper's optimum is not proven, but the best plan of {chosen.limit:g} s: {', '.join(cut) or 'nowhere'}"
        )


def _paper(result: Compiled, limit_s: float) -> Compiled | Refused:
    options = Options(
        BANDWIDTH,
        interval=result.problem.interval,
        formulation=Formulation.COMPACT,
        transfers=Transfers.PACKED,
        time_limit_s=limit_s,
    )
    return compile_graph(result.graph, options)


def _columns(paper: Compiled | Refused | None, training: int) -> tuple[str, str, str]:
    if paper is None:
        return "", "", ""
    if isinstance(paper, Refused):
        return f"none: {paper.answer.reason}", "", f"{paper.plan_s:.1f}"
    plan = paper.plan
    found = mib(plan.peak_bytes - training)
    return f"at most {found}" if plan.gap else found, f"{plan.gap:.1e}" if plan.gap else "0", f"{paper.plan_s:.1f}"


if __name__ == "__main__":
    main()
