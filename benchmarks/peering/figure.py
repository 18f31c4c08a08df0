"""A page of plots: what is lost, how an iteration's time goes after a save, what a restore and a kill cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import Report

OURS, THEIRS, UNSAFE = "#1f77b4", "#999999", "#d9a0a0"
COLUMNS = 2
BAR_IN, GAP_IN, FRAME_IN = 0.16, 0.1, 1.0  # a bar with a label of 7 points; between groups of bars; title and axis
CURVES_IN = 4.5


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot, as high as what it shows needs: labels never share a line."""

    height_in: float
    plot: Callable[[Axes], None]


def draw(report: Report, path: Path) -> None:
    """Writes a PNG."""
    figure = page(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def page(report: Report) -> Figure:
    """A plot for each thing that was measured, two in a row."""
    panels = _panels(report)
    rows = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    heights = [max(panel.height_in for panel in row) for row in rows]
    figure = plt.figure(figsize=(6.5 * COLUMNS, sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(max(1, len(rows)), COLUMNS, height_ratios=heights or None)
    for row, each in enumerate(rows):
        for column, panel in enumerate(each):
            panel.plot(figure.add_subplot(grid[row, column]))
    figure.suptitle(f"{report.machine}, {report.date}. Pale red: not durable. Grey: other tools. Blue: checkflow.")
    return figure


def _panels(report: Report) -> list[Panel]:
    panels: list[Panel] = []
    for workload in sorted({each.workload for each in report.overheads}):
        for tier in ("disk", "memory"):
            rows = [each for each in report.overheads if (each.workload, each.tier) == (workload, tier)]
            if rows:
                tools, intervals = len({row.contender for row in rows}), len({row.interval for row in rows})
                panels.append(_bars(tools, intervals, partial(_losses, report=report, workload=workload, tier=tier)))
    for workload in sorted({each.workload for each in report.overheads if each.tier == "disk" and each.interval > 1}):
        panels.append(Panel(CURVES_IN, partial(_curves, report=report, workload=workload)))
    for workload, tier in sorted({(each.workload, each.tier) for each in report.saves if each.tier == "disk"}):
        tools = sum((each.workload, each.tier) == (workload, tier) for each in report.saves)
        panels.append(_bars(tools, 1, partial(_saves, report=report, workload=workload, tier=tier)))
    for workload in sorted({each.workload for each in report.restores}):
        tools = len({each.contender for each in report.restores if each.workload == workload})
        panels.append(_bars(tools, 3, partial(_restores, report=report, workload=workload)))
    for workload in sorted({each.workload for each in report.kills}):
        tools = sum(each.workload == workload for each in report.kills)
        panels.append(_bars(tools, 1, partial(_kills, report=report, workload=workload)))
    return panels


def _bars(groups: int, of_each: int, plot: Callable[[Axes], None]) -> Panel:
    return Panel(groups * (of_each * BAR_IN + GAP_IN) + FRAME_IN, plot)


def _colour(report: Report, name: str, tier: str) -> str:
    if name.startswith("checkflow"):
        return OURS
    durable = {tool.name: tool.durable for tool in report.tools}[name]
    return THEIRS if durable or tier == "memory" else UNSAFE


def _losses(axis: Axes, report: Report, workload: str, tier: str) -> None:
    """A bar for each interval, the shortest on top and darkest."""
    rows = [each for each in report.overheads if (each.workload, each.tier) == (workload, tier)]
    intervals = sorted({row.interval for row in rows})
    axis.set_title(f"{workload}, {'on disk' if tier == 'disk' else 'in memory'}")
    frequent = sorted((row for row in rows if row.interval == intervals[0]), key=lambda row: -row.loss)
    names = [row.contender for row in frequent]
    height = 0.8 / len(intervals)
    for place, interval in enumerate(intervals):
        losses = {row.contender: 100 * max(0.0, row.loss) for row in rows if row.interval == interval}
        positions = [index + 0.4 - height * (place + 0.5) for index in range(len(names))]
        values = [losses.get(name, 0.0) for name in names]
        colours = [_colour(report, name, tier) for name in names]
        axis.barh(positions, values, height=height, color=colours, alpha=1 - 0.3 * place)
        for position, value in zip(positions, values, strict=True):
            axis.text(value, position, f" {value:.1f}, every {interval}", va="center", fontsize=7)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlim(0, 1.2 * max((100 * row.loss for row in rows), default=0) or 1)  # labels stay within
    axis.margins(y=0.01)
    axis.set_xlabel("% of throughput lost")


def _curves(axis: Axes, report: Report, workload: str) -> None:
    """Of the longest interval that was measured itself: a turn begins with the iterations after a save."""
    rows = [
        each for each in report.overheads if each.workload == workload and each.tier == "disk" and each.interval > 1
    ]
    turns = {row.turn for row in rows}
    drawn: set[str] = set()  # rows that are spread share a curve
    colours = iter(plt.get_cmap("tab20").colors[1:])  # type: ignore[attr-defined]
    for row in rows:
        if row.contender not in drawn and (row.turn == max(turns, default=0) or row.spread):
            drawn.add(row.contender)
            ours = row.contender.startswith("checkflow")
            axis.plot(
                range(1, len(row.curve) + 1), [1 / ratio for ratio in row.curve], label=row.contender,
                linewidth=2.5 if ours else 1, color=OURS if ours else next(colours), zorder=3 if ours else 2,
                linestyle="--" if ours and row.contender != "checkflow" else "-",
            )  # fmt: skip
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("iteration of a turn; its saves are due at multiples of the interval")
    axis.set_ylabel("throughput, none = 1")
    axis.set_title(f"{workload}, on disk: the dip after a save")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)


def _saves(axis: Axes, report: Report, workload: str, tier: str) -> None:
    rows = [each for each in report.saves if (each.workload, each.tier) == (workload, tier)]
    rows.sort(key=lambda row: -row.complete_ms)
    values = [row.complete_ms for row in rows]
    axis.barh(range(len(rows)), values, color=[_colour(report, row.contender, tier) for row in rows])
    for position, value in enumerate(values):
        axis.text(value, position, f" {value:.0f}", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [row.contender for row in rows])
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlim(0, 1.2 * max(values))
    axis.margins(y=0.01)
    axis.set_xlabel("ms from one save, waited for, until it is complete")
    axis.set_title(f"one save, {workload}, {'on disk' if tier == 'disk' else 'in memory'}")


def _restores(axis: Axes, report: Report, workload: str) -> None:
    cases = ("cold", "warm", "killed")
    names = sorted({each.contender for each in report.restores if each.workload == workload})
    for offset, case in enumerate(cases):
        found = {
            each.contender: each.tool_s for each in report.restores if (each.case, each.workload) == (case, workload)
        }
        positions = [index + 0.27 * (offset - 1) for index in range(len(names))]
        axis.barh(positions, [found.get(name, 0.0) for name in names], height=0.25, label=case)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("s in the tool, of a new process's way to the restored model")
    axis.set_title(f"restore, {workload}")
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)


def _kills(axis: Axes, report: Report, workload: str) -> None:
    killed = [row for row in report.kills if row.workload == workload]
    rows = sorted(killed, key=lambda row: (row.tier, statistics.mean(row.lost or [0])), reverse=True)
    labels = [f"{row.contender}, {row.tier}" for row in rows]
    means = [statistics.mean(row.lost or [0]) for row in rows]
    axis.barh(labels, means, color=[_colour(report, row.contender, row.tier) for row in rows])
    axis.set_xlabel("iterations lost at a kill, mean")
    axis.set_title(f"kills, {workload}")
    axis.tick_params(axis="y", labelsize=8)
