"""What the figures are worth when timings are off by 10%: planned with slack for it, and played against it without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graph import Graph
from checkflow.report import style
from checkflow.simulation.drift import under_random_drift, under_uniform_drift
from evaluation.paper.peaks import Peaks, mib
from evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRIFT, SLACK_PPM = 0.1, 100_000
HEADINGS = (
    "network / batch", "every", "with slack", "+ours", "+ours, slack", "+paper's optimum", "+paper's, slack",
    "saved of CheckFreq's", "saved, slack and drift", "stall, all 10% worse", "with slack", "stall, ±10% at random",
    "with slack",
)  # fmt: skip
PALE = "#f0b48a"  # beside the colour of checkflow: without slack
WIDTH = 0.2  # of a bar; networks are 1 apart


@dataclass(frozen=True, slots=True)
class Stalls:
    """Mean stalls of a schedule, as shares of the iteration."""

    worse: float  # every operator 10% shorter and the link 10% slower
    random: float  # each operator and the link off by up to 10%, anew in each iteration


@dataclass(frozen=True, slots=True)
class Drifting:
    """One network at one batch size, planned without slack and with slack 0.1."""

    plain: Peaks
    slack: Peaks  # CheckFreq's and the paper's under the drift that slack stands for
    plain_stalls: Stalls
    slack_stalls: Stalls


def stalls(graph: Graph, bandwidth_bytes_per_s: int, slack_ppm: int) -> Stalls:
    """Of our schedule at the smallest interval, when timings drift. Raises ValueError where there is no plan."""
    made = compile_graph(graph, Options(bandwidth_bytes_per_s, interval=None, slack_ppm=slack_ppm))
    if not isinstance(made, Compiled):
        raise ValueError(f"{graph.model}: has no plan at any interval")
    (worse,) = under_uniform_drift(made.schedule, graph, [DRIFT])
    (random,) = under_random_drift(made.schedule, graph, [DRIFT])
    return Stalls(worse.mean_stall, random.mean_stall)


def drifting(graph: Graph, bandwidth_bytes_per_s: int, plain: Peaks, slack: Peaks) -> Drifting:
    """Peaks of both plans, and the stalls of both."""
    return Drifting(
        plain, slack, stalls(graph, bandwidth_bytes_per_s, 0), stalls(graph, bandwidth_bytes_per_s, SLACK_PPM)
    )


def table(found: Sequence[Drifting]) -> Table:
    """A line for each; "+" is above training alone, in MiB."""
    return Table(HEADINGS, tuple(map(_line, found)))


def _line(each: Drifting) -> tuple[str, ...]:
    both = each.plain, each.slack
    optimum = [peaks.paper_bytes for peaks in both]
    return (
        f"{each.plain.network} / {each.plain.batch}",
        *(str(peaks.interval) for peaks in both),
        *(mib(peaks.executed_bytes - peaks.training_bytes) for peaks in both),
        *("" if peak is None else mib(peak - each.plain.training_bytes) for peak in optimum),
        *(f"{peaks.saving:.1%}" for peaks in both),
        *(_percent(side.worse) for side in (each.plain_stalls, each.slack_stalls)),
        *(_percent(side.random) for side in (each.plain_stalls, each.slack_stalls)),
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share else "0"


@style.styled()
def draw(found: Sequence[Drifting]) -> Figure:
    """Batch 1: stalls without slack and with it, and what slack costs in memory."""
    small = [each for each in found if each.plain.batch == 1]
    figure = style.new_figure(6.4)
    stall, memory = figure.subplots(2, 1, sharex=True)
    _bars(stall, small, 0, "no slack, every timing 10% worse", PALE, lambda each: 100 * each.plain_stalls.worse)
    _bars(stall, small, 1, "no slack, ±10% at random", style.TRAINING, lambda each: 100 * each.plain_stalls.random)
    _bars(stall, small, 2, "slack 0.1, either", style.LIVE,
          lambda each: 100 * max(each.slack_stalls.worse, each.slack_stalls.random))  # fmt: skip
    _bars(memory, small, 0.5, "no slack", PALE, lambda each: _added(each.plain))
    _bars(memory, small, 1.5, "slack 0.1", style.LIVE, lambda each: _added(each.slack))
    stall.set_ylabel("stall\n(% of the iteration)")
    memory.set_ylabel("added to the peak\n(% of the state)")
    memory.set_xticks(range(len(small)), [_name(each) for each in small])
    for axes in (stall, memory):
        axes.margins(y=0.2)
        axes.tick_params(axis="x", length=0)
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.25), ncols=3)
    figure.suptitle("Ours at batch 1 when timings drift by 10%: what stalls, and what slack costs", x=0.01, ha="left")
    return figure


def _bars(
    axes: Axes, found: Sequence[Drifting], number: float, name: str, colour: str, height: Callable[[Drifting], float]
) -> None:
    places = [place + (number - 1) * WIDTH for place in range(len(found))]
    heights = [height(each) for each in found]
    axes.bar(places, heights, width=WIDTH * 0.94, color=colour, label=name)
    for place, tall in zip(places, heights, strict=True):
        text = f"{tall:.0f}" if not tall or tall >= 1 else f"{tall:.1f}"
        axes.annotate(text, (place, tall), (0, 2), textcoords="offset points", ha="center", size=9)


def _added(peaks: Peaks) -> float:
    return 100 * (peaks.executed_bytes - peaks.training_bytes) / peaks.state_bytes


def _name(each: Drifting) -> str:
    intervals = dict.fromkeys((each.plain.interval, each.slack.interval))
    if list(intervals) == [1]:
        return each.plain.network
    return f"{each.plain.network}\n(every {', with slack '.join(map(str, intervals))})"
