"""Where a checkpoint at every iteration cannot be: what each interval costs, in memory and in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from checkflow.report import style
from checkflow.sweep import Row
from checkflow.sweep.cells import CHECKFLOW
from checkflow.units import format_bytes, format_ns, format_rate
from evaluation.feasibility.maps import OPTIMIZER, added_bytes, name_of, setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {  # of each policy: name, colour, marker
    CHECKFLOW: ("checkflow", style.CHECKFLOW, "s"),
    "checkfreq": ("CheckFreq, snapshot on the GPU", style.CYCLE[0], "o"),
    "checkfreq_cpu": ("CheckFreq, snapshot on the CPU", style.CYCLE[2], "^"),
    "synchronous": ("training waits for the whole copy", style.CYCLE[3], "D"),
}
HEADINGS = ("policy", "k", "snapshots", "added", "pause", "slower by")


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    """For each row its policy, interval, memory and time, or why there is no plan. Columns: HEADINGS."""
    return tuple(_texts(row) for row in rows)


def _texts(row: Row) -> tuple[str, ...]:
    if not row.feasible:
        return (row.cell.policy, f"{row.interval}", f"infeasible ({row.reason})", "", "", "")
    assert row.peak_bytes is not None and row.training_peak_bytes is not None
    return (
        row.cell.policy,
        f"{row.interval}",
        format_bytes(row.snapshot_bytes or 0),
        format_bytes(row.peak_bytes - row.training_peak_bytes),
        format_ns(row.pause_ns or 0),
        f"{row.overhead:.1%}",
    )


@style.styled()
def draw(rows: Sequence[Row]) -> Figure:
    """A panel for each model: memory added across, slowdown of training up, a point for each policy and interval k.

    Rows of one device with their intervals given, of policies in LOOKS.
    """
    names = list(dict.fromkeys(name_of(row) for row in rows))
    figure = style.new_figure(5.4)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        here = [row for row in rows if name_of(row) == name]
        for policy in LOOKS:
            _draw_policy(axes, [row for row in here if row.cell.policy == policy and row.feasible], policy)
        first = here[0]
        refused = [row.interval or 0 for row in here if not row.feasible]
        why = f"checkflow: none at k <= {max(refused)}, the link is too slow" if refused else ""
        axes.set_title(
            f"{name}, {setting(first, OPTIMIZER)}: {format_bytes(first.state_bytes or 0)} of state, "
            f"iteration {format_ns(first.iteration_time_ns or 0)}\n{why}",
            fontsize=10,
        )
        axes.set_xlabel("memory added to the training peak (MiB)")
        axes.set_yscale("log")
        axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1, 3], ["1%", "3%", "10%", "30%", "100%", "300%"])
        axes.minorticks_off()
        axes.grid(axis="y", color=style.FAINT, alpha=0.3)
        axes.margins(x=0.14)
    panels[0].set_ylabel("training is slower by")
    rate = format_rate(rows[0].bandwidth_bytes_per_s or 0)
    figure.suptitle(
        f"What a checkpoint every k iterations costs over a link of {rate}; the number is k", x=0.01, ha="left"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=9)
    return figure


def _draw_policy(axes: Axes, rows: Sequence[Row], policy: str) -> None:
    name, colour, marker = LOOKS[policy]
    overheads = [row.overhead or 0.0 for row in rows]
    at = [added_bytes(row) / 2**20 for row in rows]
    axes.plot(at, overheads, marker, color=colour, linestyle="-", linewidth=1, label=name)
    left = policy in (CHECKFLOW, "synchronous")
    for x, row in zip(at, rows, strict=True):
        axes.annotate(f"{row.interval}", (x, row.overhead or 0.0), (-7 if left else 7, 0), textcoords="offset points",
                      ha="right" if left else "left", va="center", color=colour, fontsize=8)  # fmt: skip
