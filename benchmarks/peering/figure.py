"""A page of plots: what is lost, how an iteration's time goes after a save, what a restore and a kill cost."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .results import Report

OURS, THEIRS, UNSAFE = "#1f77b4", "#999999", "#d9a0a0"


def draw(report: Report, path: Path) -> None:
    """One column for each workload measured, and a last row for kills. Writes a PNG."""
    workloads = sorted({each.workload for each in report.overheads})
    columns = max(2, len(workloads))
    figure, axes = plt.subplots(4, columns, figsize=(6.5 * columns, 17), squeeze=False, layout="constrained")
    for column, workload in enumerate(workloads):
        _losses(axes[0][column], report, workload, "disk")
        _losses(axes[1][column], report, workload, "memory")
        _curves(axes[2][column], report, workload)
    for axis in axes[:3, len(workloads) :].flat:
        axis.set_axis_off()
    _restores(axes[3][0], report)
    _kills(axes[3][1], report)
    for axis in axes[3][2:]:
        axis.set_axis_off()
    figure.suptitle(f"{report.machine}, {report.date}. Pale red: not durable. Grey: other tools. Blue: checkflow.")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


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
    if not rows:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
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
    axis.margins(x=0.15)
    axis.set_xlabel("% of throughput lost")


def _curves(axis: Axes, report: Report, workload: str) -> None:
    """Of the longest interval that was measured itself: a turn begins with the iterations after a save."""
    rows = [
        each for each in report.overheads if each.workload == workload and each.tier == "disk" and each.interval > 1
    ]
    turns = {row.turn for row in rows}
    drawn: set[str] = set()  # rows that are spread share a curve
    for row in rows:
        if row.contender not in drawn and (row.turn == max(turns, default=0) or row.spread):
            drawn.add(row.contender)
            ours = row.contender.startswith("checkflow")
            axis.plot(
                range(1, len(row.curve) + 1), [1 / ratio for ratio in row.curve], label=row.contender,
                linewidth=2.5 if ours else 1, color=OURS if ours else None, zorder=3 if ours else 2,
                linestyle="--" if ours and row.contender != "checkflow" else "-",
            )  # fmt: skip
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("iteration of a turn; its saves are due at multiples of the interval")
    axis.set_ylabel("throughput, none = 1")
    axis.set_title(f"{workload}, on disk: the dip after a save")
    if rows:
        axis.legend(fontsize=7, loc="lower center", ncols=3)


def _restores(axis: Axes, report: Report) -> None:
    cases = ("cold", "warm", "killed")
    workload = max((each.workload for each in report.restores), default="")
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
    axis.legend(fontsize=8)


def _kills(axis: Axes, report: Report) -> None:
    workload = min((row.workload for row in report.kills), default="")
    killed = [row for row in report.kills if row.workload == workload]
    rows = sorted(killed, key=lambda row: (row.tier, statistics.mean(row.lost or [0])), reverse=True)
    labels = [f"{row.contender}, {row.tier}" for row in rows]
    means = [statistics.mean(row.lost or [0]) for row in rows]
    axis.barh(labels, means, color=[_colour(report, row.contender, row.tier) for row in rows])
    axis.set_xlabel("iterations lost at a kill, mean")
    axis.set_title(f"kills, {workload}")
    axis.tick_params(axis="y", labelsize=8)
