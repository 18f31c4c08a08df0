"""Pictures of the links over which checkpoints cost no memory, and of an update that runs inside backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from checkflow.report import style
from evaluation.ablation.freelink import FreeLink
from evaluation.ablation.study import NOT_CYCLIC, PARTS, Study
from evaluation.feasibility.maps import GB, PCIE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS: tuple[tuple[str, str, str, int, Callable[[FreeLink], int | None]], ...] = (
    ("paper's optimum", style.CYCLE[3], "x", 7, lambda free: free.paper_bytes_per_s),
    ("planned, all but cyclic windows", style.CYCLE[5], "|", 11, lambda free: free.not_cyclic_bytes_per_s),
    ("planned, all parts", style.PLAIN, "o", 7, lambda free: free.planned_bytes_per_s),
    ("as executed", style.CHECKFLOW, "d", 5, lambda free: free.executed_bytes_per_s),
)


@style.styled()
def draw_free(studies: Sequence[Study], optimizers: Sequence[str]) -> Figure:
    """For each cell the slowest links over which every iteration's checkpoint adds no byte; a panel an optimizer."""
    figure = style.new_figure(1.9 + 0.27 * len(studies) / len(optimizers))
    panels = figure.subplots(1, len(optimizers), sharex=True, squeeze=False)[0]
    for axes, optimizer in zip(panels, optimizers, strict=True):
        cells = sorted((s for s in studies if s.cell.endswith(f" {optimizer}")), key=lambda s: s.free.any_bytes_per_s)
        least = [each.free.any_bytes_per_s / GB for each in cells]
        axes.barh(range(len(cells)), least, height=0.4, color="#d9d9d9", label="no plan: the link is too slow")
        for name, colour, marker, size, rate in WAYS:
            known = [(at / GB, y) for y, each in enumerate(cells) if (at := rate(each.free)) is not None]
            axes.plot(*zip(*known, strict=True), marker, color=colour, markersize=size, markeredgewidth=2, label=name)
        axes.set_yticks(range(len(cells)), [each.cell.removesuffix(f" {optimizer}") for each in cells])
        axes.set(xscale="log", xlabel="link (GB/s)")
        axes.set_title(optimizer, pad=22)
        for link, speed in PCIE.items():
            axes.axvline(speed, color=style.FAINT, linewidth=0.8, linestyle=":", zorder=0)
            axes.annotate(
                link.removeprefix("PCIe "),
                (speed, 1.0),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=8,
            )
        axes.annotate("PCIe", (10, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom", fontsize=8)
        axes.set_xlim(0.4, 900)
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    figure.suptitle("The slowest link over which a checkpoint at every iteration adds no byte", x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=5, fontsize=8.5)
    return figure


@style.styled()
def draw_in_backward(after: Sequence[Study], inside: Sequence[Study]) -> Figure:
    """Memory added as executed: an update after backward, against the same update inside it, network by network."""
    figure = style.new_figure(4.0)
    axes = figure.subplots()
    bars = (
        ("optimizer.step() after backward", style.FAINT, after, PARTS[-1]),
        ("inside backward, without cyclic windows", style.CYCLE[5], inside, NOT_CYCLIC),
        ("inside backward, all parts", style.CHECKFLOW, inside, PARTS[-1]),
    )
    for place, (name, colour, studies, part) in enumerate(bars):
        rows = [each.row(part) for each in studies]
        shares = [100 * (row.executed_added_bytes or 0) / row.state_bytes for row in rows]
        at = [number + 0.28 * (place - 1) for number in range(len(rows))]
        axes.bar(at, shares, 0.26, color=colour, label=name)
        for x, share, row in zip(at, shares, rows, strict=True):
            mib = f"{(row.executed_added_bytes or 0) / 2**20:.0f} MiB"
            axes.annotate(f"{mib}\nk = {row.interval}", (x, share), (0, 2), textcoords="offset points", ha="center",
                          va="bottom", fontsize=8)  # fmt: skip
    axes.set_xticks(range(len(after)), [each.cell for each in after])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 122)
    axes.set_ylabel("added to the training peak\n(% of the state)")
    axes.legend(loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.13))
    figure.suptitle("What checkpoints add as executed, where the update runs", x=0.01, ha="left")
    return figure
