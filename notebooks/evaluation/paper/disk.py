"""The paper's analysis of disks: what they have to write, a second, to keep every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from checkflow.report import style
from checkflow.sweep import Row
from evaluation.paper.peaks import name_of
from evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALEXNET_1_GB_PER_S, LARGER_GB_PER_S = 37, 5  # the paper's "larger than" and "smaller than"
INTERFACES = {  # GB/s that cross them at most, by their standards: lanes x transfers x coding
    "SATA 3": 6 * 8 / 10 / 8,
    "NVMe, PCIe 4.0 x4": 4 * 16 * 128 / 130 / 8,
    "NVMe, PCIe 5.0 x4": 4 * 32 * 128 / 130 / 8,
}


def needed_gb_per_s(row: Row) -> float:
    """State bytes over the iteration's time: each iteration's checkpoint, written before the next one is there."""
    return (row.state_bytes or 0) / (row.iteration_time_ns or 1)


def table(rows: Sequence[Row]) -> Table:
    """GB/s by network, a column for each batch size and profile of the rows."""
    columns = list(dict.fromkeys((name_of(row)[1], row.device or "") for row in rows))
    found = {(*name_of(row), row.device): f"{needed_gb_per_s(row):.1f}" for row in rows}
    networks = dict.fromkeys(name_of(row)[0] for row in rows)
    headings = ("network", *(f"batch {batch}, {device}" for batch, device in columns))
    return Table(headings, tuple((name, *(found[name, *column] for column in columns)) for name in networks))


@style.styled()
def draw(rows: Sequence[Row]) -> Figure:
    """A column for each network: batch 1 above, batch 32 below, for each profile; and what interfaces carry."""
    figure = style.new_figure(5.2)
    axes = figure.subplots()
    networks = list(dict.fromkeys(name_of(row)[0] for row in rows))
    devices = list(dict.fromkeys(row.device or "" for row in rows))
    for number, device in enumerate(devices):
        for batch, marker in ((1, "o"), (32, "s")):
            here = {name_of(row)[0]: needed_gb_per_s(row) for row in rows if row.device == device
                    and name_of(row)[1] == batch}  # fmt: skip
            places = [networks.index(name) + 0.18 * (number - (len(devices) - 1) / 2) for name in here]
            axes.plot(places, list(here.values()), marker, markersize=9, color=style.CYCLE[number],
                      markerfacecolor="white" if batch == 32 else None, markeredgewidth=1.8,
                      label=f"{device}, batch {batch}")  # fmt: skip
    axes.plot(networks.index("alexnet"), ALEXNET_1_GB_PER_S, "*", markersize=17, color=style.INK,
              label="the paper: AlexNet, batch 1 (over 37)")  # fmt: skip
    axes.axhspan(0.1, LARGER_GB_PER_S, color=style.LIVE, alpha=0.08, linewidth=0,
                 label="the paper: larger models or batches (under 5)")  # fmt: skip
    for name, rate in INTERFACES.items():
        axes.axhline(rate, color=style.FAINT, linewidth=1, linestyle="--")
        axes.annotate(f"{name}: {rate:.1f}", (len(networks) - 0.5, rate), (0, 3), textcoords="offset points",
                      size=9, color=style.FAINT)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(0.2, 250)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("write throughput needed (GB/s)")
    axes.set_xticks(range(len(networks)), networks)
    axes.set_xlim(-0.6, len(networks) + 0.75)
    axes.tick_params(axis="x", length=0)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle("What a disk has to write to keep every iteration's checkpoint", x=0.01, ha="left")
    return figure
