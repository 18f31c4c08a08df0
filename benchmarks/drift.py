"""What the evaluation's figures are worth when timings are not those that were planned with.

First table: peaks, planned for the timings as they are and with slack 0.1, which stands a drift of 10% of every timing.
CheckFreq's and the paper's optimum under that drift are those of a problem whose timings are all 10% worse. Memory
follows anchors and not times, so a schedule's executed peak holds under any drift. Second table: the stalls of both of
our schedules, as shares of the iteration, when every timing is 10% worse, and when each is off by up to 10% at random.
The interval is the smallest that is feasible.

    python benchmarks/drift.py [--networks alexnet,bert] [--batches 1,32] [--optimizers sgd] [--no-paper]
"""

from __future__ import annotations

from statistics import fmean, median

from cells import BANDWIDTH, Cell, arguments, cells, mib
from rich.console import Console
from rich.table import Table

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.plan import PPM, Formulation, Transfers, problem_of
from checkflow.policies.checkfreq import at_best
from checkflow.simulation.drift import tolerated, tolerated_drift_ppm, under_random_drift, under_uniform_drift

DRIFT = 0.1
SLACK_PPM = 100_000
PEAKS = (
    "cell", "k", "k with slack", "training peak MiB", "+CheckFreq", "+CheckFreq, drift", "+paper's optimum",
    "+paper's, drift", "+executed", "+executed, slack", "saved of CheckFreq's peak", "saved under drift",
)  # fmt: skip
STALLS = (
    "cell", "link may be slower by", "with slack", "random up to", "with slack", "stall, all 10% worse", "with slack",
    "stall, 10% at random: mean", "p99", "iterations", "with slack: mean", "p99", "iterations",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's optimum out")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each solve of the paper's optimum")
    parser.set_defaults(optimizers="sgd")
    chosen = parser.parse_args()
    peaks, stalls = Table(*PEAKS, box=None), Table(*STALLS, box=None)
    saved: list[tuple[float, float]] = []
    unadded: list[tuple[bool, bool]] = []
    for cell in cells(chosen):
        plain, slack = (_compiled(cell, slack_ppm) for slack_ppm in (0, SLACK_PPM))
        checkfreq = [_checkfreq(cell, made.problem.interval, ppm) for made, ppm in ((plain, 0), (slack, SLACK_PPM))]
        executed = [made.schedule.certificate.peak_bytes for made in (plain, slack)]
        training = plain.schedule.certificate.training_peak_bytes
        saved.append((1 - executed[0] / checkfreq[0], 1 - executed[1] / checkfreq[1]))
        unadded.append((executed[0] == training, executed[1] == training))
        paper = ["", ""] if chosen.no_paper else [_paper(made, chosen.limit, training) for made in (plain, slack)]
        peaks.add_row(
            str(cell),
            str(plain.problem.interval),
            str(slack.problem.interval),
            mib(training),
            *(mib(peak - training) for peak in checkfreq),
            *paper,
            *(mib(peak - training) for peak in executed),
            *(f"{share:.1%}" for share in saved[-1]),
        )
        stalls.add_row(str(cell), *_drifts(plain, slack))
    console = Console(width=200)
    console.print(peaks)
    console.print(stalls)
    for which, name in ((0, "as planned"), (1, "slack 0.1, timings 10% worse")):
        shares = [pair[which] for pair in saved]
        print(
            f"{name}: no added byte in {sum(pair[which] for pair in unadded)} of {len(unadded)} cells; saved of "
            f"CheckFreq's peak: mean {fmean(shares):.1%}, median {median(shares):.1%}, largest {max(shares):.1%}"
        )


def _compiled(cell: Cell, slack_ppm: int) -> Compiled:
    made = compile_graph(cell.graph, Options(BANDWIDTH, interval=None, slack_ppm=slack_ppm))
    assert isinstance(made, Compiled)
    return made


def _checkfreq(cell: Cell, interval: int, slack_ppm: int) -> int:
    problem = problem_of(cell.graph, bandwidth_bytes_per_s=BANDWIDTH, interval=interval, slack_ppm=slack_ppm)
    return at_best(problem).peak_bytes


def _paper(made: Compiled, limit_s: float, training: int) -> str:
    options = Options(
        BANDWIDTH,
        interval=made.problem.interval,
        slack_ppm=made.schedule.slack_ppm,
        formulation=Formulation.COMPACT,
        transfers=Transfers.PACKED,
        time_limit_s=limit_s,
    )
    found = compile_graph(made.graph, options)
    return mib(found.plan.peak_bytes - training) if isinstance(found, Compiled) else f"none: {found.answer.reason}"


def _drifts(plain: Compiled, slack: Compiled) -> list[str]:
    limits, grid, uniform, random = [], [], [], []
    for made in (plain, slack):
        limits.append(f"{tolerated_drift_ppm(made.schedule, made.graph) / PPM:.1%}")
        grid.append(f"{tolerated(under_random_drift(made.schedule, made.graph)):.0%}")
        (worse,) = under_uniform_drift(made.schedule, made.graph, [DRIFT])
        uniform.append(f"{worse.mean_stall:.2%}")
        (noisy,) = under_random_drift(made.schedule, made.graph, [DRIFT])
        random += [f"{noisy.mean_stall:.2%}", f"{noisy.p99_stall:.2%}", f"{noisy.stalled / noisy.iterations:.0%}"]
    return [*limits, *grid, *uniform, *random]


if __name__ == "__main__":
    main()
