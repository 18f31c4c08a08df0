"""What slack costs, and the stalls that it saves, as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.plan import PPM
from checkflow.report import style
from checkflow.simulation.drift import Drifted, under_uniform_drift
from evaluation.ablation.prices import SlackPrice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRIFTS = tuple(percent / 100 for percent in range(0, 41, 2))
LINES = ("-", "--", "-.", ":")


def stalls(graph: Graph, options: Options, slacks: Sequence[float]) -> dict[float, tuple[Drifted, ...]]:
    """For each slack, what the plan stalls when every timing drifts to the bad side by each of DRIFTS."""
    found = {}
    for slack in slacks:
        made = compile_graph(graph, replace(options, slack_ppm=round(slack * PPM)))
        if not isinstance(made, Compiled):
            raise InputError(f"slack: {slack} leaves no plan ({made.answer.reason}); give less")
        found[slack] = under_uniform_drift(made.schedule, graph, DRIFTS)
    return found


@style.styled()
def draw(name: str, prices: Sequence[SlackPrice], curves: Mapping[float, Sequence[Drifted]]) -> Figure:
    """What each slack costs in memory; and beside it the mean stall against drift, a line for each slack."""
    figure = style.new_figure(4.2)
    cost, gain = figure.subplots(1, 2)
    known = [(100 * price.slack, price) for price in prices if price.certificate is not None]
    at = [slack for slack, _ in known]
    certificates = [price.certificate for _, price in known if price.certificate is not None]
    unit, unit_name = style.byte_unit(max(each.snapshot_bytes for each in certificates) or 1)
    added = [(each.peak_bytes - each.training_peak_bytes) / unit for each in certificates]
    copied = [each.snapshot_bytes / unit for each in certificates]
    cost.plot(at, added, "s-", color=style.CHECKFLOW, label="added to the training peak")
    cost.plot(at, copied, "o--", color=style.PLAIN, label="copied into snapshots")
    for (slack, price), y in zip(known, copied, strict=True):
        cost.annotate(f"k = {price.interval}", (slack, y), (-4, 7), textcoords="offset points", ha="right", fontsize=9)
    cost.set(title="what it costs, as executed", xlabel="slack (%)", ylabel=unit_name)
    cost.set_xlim(min(at) - 4, max(at) + 2)
    cost.set_ylim(-0.04 * max(copied, default=1), 1.2 * max(copied, default=1))
    cost.legend(loc="upper left", fontsize=9)
    for line, colour, (slack, drifted) in zip(LINES, style.CYCLE, curves.items(), strict=False):
        xs, ys = [100 * each.drift for each in drifted], [100 * each.mean_stall for each in drifted]
        gain.plot(xs, ys, line, color=colour, linewidth=2.2, label=f"slack {slack:.0%}")
    gain.set(title="what it buys", xlabel="drift of every timing to the bad side (%)", ylabel="training stalls (%)")
    gain.legend(loc="upper left", fontsize=9)
    figure.suptitle(f"{name}: slack, its price, and stalls with and without it", x=0.01, ha="left")
    return figure
