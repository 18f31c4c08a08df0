"""Maps of what can be checkpointed how often: a tile for each cell of a sweep, with the smallest interval in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from checkflow.errors import InputError
from checkflow.report import style
from checkflow.sweep import Edge, Grid, Row
from checkflow.sweep.cells import BATCH_SIZE, Axis
from checkflow.sweep.running import answers, in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPTIMIZER = "optimizer"
GB = 1e9
PCIE = {"PCIe 3": 12.6, "PCIe 4": 25.2, "PCIe 5": 50.4}  # x16, GB/s, at the bundled profiles' efficiency
BUSY = ("#e6f4ef", "#8fcdb5")  # a link that is used at an interval of 1: little, all of it
HELD = ("#fbe3d3", "#ef9a63")  # memory that is added, or an interval above 1: little, much
OVER = "#e4e4e4"


def link_use(row: Row) -> float:
    """What a checkpoint at every iteration asks of the link, as a fraction of what it carries: S / (B T)."""
    if row.state_bytes is None or not row.iteration_time_ns or not row.bandwidth_bytes_per_s:
        raise InputError(f"{name_of(row)}: has no figures, since its cell failed: {row.message}")
    return row.state_bytes * 1e9 / (row.bandwidth_bytes_per_s * row.iteration_time_ns)


def added_bytes(row: Row) -> int:
    """What a plan adds to the training peak; 0 without a plan."""
    return (row.largest_bytes or 0) - (row.training_peak_bytes or 0)


def name_of(row: Row) -> str:
    """alexnet/32"""
    return f"{row.cell.model}/{setting(row, BATCH_SIZE)}"


def setting(row: Row, name: str) -> str:
    return dict(row.cell.settings).get(name, "")


def rows_and_edges(grid: Grid) -> tuple[tuple[Row, ...], tuple[Edge, ...]]:
    """The rows of a grid, and for each of its columns the least bandwidth for an interval of 1; traces are shared."""
    cells = grid.cells()
    fixed = {"intervals": (1,), "bandwidths_bytes_per_s": (None,)}
    searches = grid.model_copy(update=fixed).searches(Axis.BANDWIDTH)
    found = in_order((*cells, *searches), answers((*cells, *searches), None, None, lambda _: None))
    return tuple(a for a in found if isinstance(a, Row)), tuple(a for a in found if isinstance(a, Edge))


@style.styled()
def draw_devices(rows: Sequence[Row]) -> Figure:
    """A panel for each optimizer, a line for each model, a column for each device: k, and what k = 1 asks of the link.

    Rows at the devices' own links, at interval `auto`, of one optimizer, model and device each.
    """
    optimizers = list(dict.fromkeys(setting(row, OPTIMIZER) for row in rows))
    names = list(dict.fromkeys(name_of(row) for row in rows))
    devices = list(dict.fromkeys(row.cell.device or "" for row in rows))
    links = {row.cell.device or "": (row.bandwidth_bytes_per_s or 0) / GB for row in rows}
    figure = style.new_figure(1.9 + 0.46 * len(names))
    panels = figure.subplots(1, len(optimizers), sharey=True, squeeze=False)[0]
    for axes, optimizer in zip(panels, optimizers, strict=True):
        for row in rows:
            if setting(row, OPTIMIZER) == optimizer:
                x, y = devices.index(row.cell.device or ""), names.index(name_of(row))
                edges = (x - 0.5, x + 0.5, y - 0.5, y + 0.5)
                use = link_use(row)
                colour = _shade(HELD, (use - 1) / 3) if use > 1 else _shade(BUSY, use)
                _tile(axes, edges, row, colour, (x, y + 0.05), f"{use:.0%}")
        axes.set_title(optimizer)
        labels = [f"{device}\n{links[device]:.0f} GB/s" for device in devices]
        axes.set_xticks(range(len(devices)), labels, fontsize=8, rotation=35)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(devices) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        _bare(axes)
    figure.suptitle("Smallest interval: a checkpoint every k iterations", x=0.01, ha="left")
    _legend(figure, rows, "at every iteration; % of the link it uses", "at every k-th; % of the link k = 1 would use")
    return figure


@style.styled()
def draw_bandwidths(rows: Sequence[Row], edges: Sequence[Edge]) -> Figure:
    """A panel for each model and optimizer: batch size across, bandwidth up, k in each tile, and where k = 1 begins.

    Rows at interval `auto` of one device, edges along the bandwidth; the line goes through what was searched.
    """
    names = list(dict.fromkeys(row.cell.model for row in rows))
    optimizers = list(dict.fromkeys(setting(row, OPTIMIZER) for row in rows))
    figure = style.new_figure(1.2 + 3.2 * len(names))
    grid = figure.subplots(len(names), len(optimizers), sharex=True, sharey=True, squeeze=False)
    for axes, (name, optimizer) in zip(grid.flat, [(n, o) for n in names for o in optimizers], strict=True):
        here = [row for row in rows if (row.cell.model, setting(row, OPTIMIZER)) == (name, optimizer)]
        batches = _cuts([int(setting(row, BATCH_SIZE)) for row in here])
        rates = _cuts([(row.bandwidth_bytes_per_s or 0) / GB for row in here])
        for row in here:
            batch, rate = int(setting(row, BATCH_SIZE)), (row.bandwidth_bytes_per_s or 0) / GB
            added = added_bytes(row) / (row.training_peak_bytes or 1)
            colour = _shade(HELD, 2 * added) if added else _shade(BUSY, link_use(row))
            _tile(axes, (*batches[batch], *rates[rate]), row, colour, (batch, rate))
        line = [
            (int(setting(found, BATCH_SIZE)), (found.bandwidth_bytes_per_s or 0) / GB)
            for found in (edge.found for edge in edges)
            if found is not None and (found.cell.model, setting(found, OPTIMIZER)) == (name, optimizer)
        ]
        axes.plot(*zip(*sorted(line), strict=True), color=style.PLAIN, linewidth=3)
        for rate in PCIE.values():
            axes.axhline(rate, color=style.INK, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", title=f"{name}, {optimizer}")
        axes.set_xlim(min(low for low, _ in batches.values()), max(high for _, high in batches.values()))
        axes.set_ylim(min(low for low, _ in rates.values()), max(high for _, high in rates.values()))
        axes.set_xticks(list(batches), [str(batch) for batch in batches])
        axes.set_yticks(list(rates), [f"{rate:g}" for rate in rates])
        _bare(axes)
    for axes in grid[-1]:
        axes.set_xlabel("batch size")
    for axes in grid[:, 0]:
        axes.set_ylabel("link (GB/s)")
    for axes in grid[:, -1]:
        for link, rate in PCIE.items():
            axes.annotate(link, (1.01, rate), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    title = f"Smallest interval k on {rows[0].device}; above the line a checkpoint at every iteration is feasible"
    figure.suptitle(title, x=0.01, ha="left")
    _legend(
        figure,
        rows,
        "no byte of memory is added; the deeper, the busier the link",
        "the deeper, the more memory is added",
    )
    return figure


def _tile(
    axes: Axes, edges: tuple[float, float, float, float], row: Row, colour: str, at: tuple[float, float], note: str = ""
) -> None:
    """A tile with the interval in it, and a note below that; hatched where the device has too little memory."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    left, right, low, high = edges
    face, hatch, ink = (OVER, "////", style.FAINT) if row.exceeds_memory else (colour, None, style.INK)
    axes.add_patch(
        Rectangle((left, low), right - left, high - low, facecolor=face, edgecolor="white", linewidth=1.2, hatch=hatch)
    )
    weight = "bold" if row.interval == 1 else "normal"
    halo = [withStroke(linewidth=3, foreground=face)]
    axes.annotate(f"{row.interval}", at, (0, 4 if note else 0), textcoords="offset points", ha="center", va="center",
                  color=ink, fontsize=11, fontweight=weight, path_effects=halo)  # fmt: skip
    if note:
        axes.annotate(note, at, (0, -8), textcoords="offset points", ha="center", va="center", fontsize=7, color=ink)


def _shade(ends: tuple[str, str], depth: float) -> str:
    """A colour between two; depth from 0 to 1."""
    from matplotlib.colors import to_hex, to_rgb

    scale = min(1.0, max(0.0, depth))
    red, green, blue = (a + (b - a) * scale for a, b in zip(*map(to_rgb, ends), strict=True))
    return to_hex((red, green, blue))


def _cuts(values: Sequence[float]) -> dict[float, tuple[float, float]]:
    """For each of the values, on a logarithmic axis, where its tile begins and ends: halfway to its neighbours."""
    known = sorted(set(values))
    middles = [float(np.sqrt(a * b)) for a, b in pairwise(known)]
    ends = [known[0] ** 2 / middles[0], *middles, known[-1] ** 2 / middles[-1]]
    return dict(zip(known, pairwise(ends), strict=True))


def _bare(axes: Axes) -> None:
    axes.tick_params(which="both", length=0)
    axes.minorticks_off()
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, rows: Sequence[Row], green: str, orange: str) -> None:
    from matplotlib.patches import Patch

    swatches = [Patch(facecolor=BUSY[1], label=green), Patch(facecolor=HELD[1], label=orange)]
    if any(row.exceeds_memory for row in rows):
        swatches.append(Patch(facecolor=OVER, hatch="////", edgecolor="white", label="more memory than the device has"))
    figure.legend(handles=swatches, loc="outside lower left", ncols=3, fontsize=9)
