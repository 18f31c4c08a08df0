"""Pictures and tables of an ablation: what each part buys, and what of it is left as executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from checkflow.report import style
from evaluation.ablation.study import PARTS, Ablated, Study
from evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
EXECUTED = "all, as executed"
FACES = ("#f4f4f4", "#e1783c")  # of a table's cell: nothing added, the whole state added
SUMMARY = (
    "part", "MiB saved of the peak, median of the hard cells", "most", "copied less, % of the state, median", "most",
    "fewer transfers, median", "most",
)  # fmt: skip
MEASURES: tuple[tuple[str, Callable[[Ablated], float], Callable[[float], str], float], ...] = (
    ("copied into snapshots, % of the state", lambda row: _copied(row), "{:.0f}".format, 0),
    ("transfers in the plan", lambda row: row.transfers, "{:.0f}".format, 1),
    ("time to plan (ms)", lambda row: 1e3 * row.plan_s, "{:.0f}".format, 1),
)


def hard(studies: Sequence[Study]) -> list[Study]:
    """The cells in which any set of parts adds a byte as planned, or all of them as executed."""
    return [s for s in studies if _executed(s) or any(row.added_bytes for row in s.rows)]


@style.styled()
def draw_added(studies: Sequence[Study]) -> Figure:
    """A line for each hard cell, a column for each part added, and what of it is left as executed: MiB added."""
    cells = hard(studies)
    columns = [*(part.name for part in PARTS), EXECUTED]
    figure = style.new_figure(1.5 + 0.36 * len(cells))
    axes = figure.subplots()
    for y, each in enumerate(cells):
        planned = [each.row(part).added_bytes for part in PARTS]
        for x, added in enumerate((*planned, _executed(each))):
            share = min(1.0, added / each.rows[0].state_bytes)
            at = x + (0.15 if x == len(PARTS) else 0)
            _box(axes, at, y, share)
            text = f"{added / MIB:.1f}" if 0 < added < 10 * MIB else f"{added / MIB:.0f}"
            axes.text(at, y, text, ha="center", va="center", fontweight="normal" if added else "bold")
    axes.set_xticks([0, 1, 2, 3, 4.15], columns)
    axes.set_yticks(range(len(cells)), [f"{each.cell}, k = {each.rows[0].interval}" for each in cells])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.5, 4.65)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    others = len(studies) - len(cells)
    figure.suptitle(
        "MiB that checkpoints add to the training peak, with one part more in each column", x=0.01, ha="left"
    )
    axes.set_xlabel(f"white: nothing; deep orange: as much as the whole state; the other {others} cells: 0 throughout")
    return figure


def _box(axes: Axes, x: float, y: float, share: float) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    colour = tuple(a + (b - a) * share for a, b in zip(*map(to_rgb, FACES), strict=True))
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))


@style.styled()
def draw_parts(studies: Sequence[Study]) -> Figure:
    """Snapshot bytes, transfers and planning time against the parts: a line for each cell, and the median."""
    figure = style.new_figure(4.4)
    panels = figure.subplots(1, len(MEASURES))
    for axes, (name, value, text, floor) in zip(panels, MEASURES, strict=True):
        for each in studies:
            axes.plot([max(floor, value(each.row(part))) for part in PARTS], color=style.PLAIN, alpha=0.25, linewidth=1)
        middles = [median(value(each.row(part)) for each in studies) for part in PARTS]
        axes.plot(middles, "o-", color=style.CHECKFLOW, linewidth=2.5)
        for x, middle in enumerate(middles):
            axes.annotate(text(middle), (x, max(floor, middle)), (0, 8), textcoords="offset points", ha="center",
                          color=style.CHECKFLOW, fontweight="bold")  # fmt: skip
        if floor:
            axes.set_yscale("log")
        else:
            axes.set_ylim(-4, 112)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(
            range(len(PARTS)), ["paper's\noptimum", "+ direct\noffload", "+ cyclic\nwindows", "+ stream-\ning"]
        )
        axes.margins(x=0.12)
    figure.suptitle(f"Each of {len(studies)} cells a line, the median in orange", x=0.01, ha="left")
    return figure


def summary(studies: Sequence[Study]) -> Table:
    """What each part buys beyond those before it, and what moving the plan to anchors takes back."""
    cells = hard(studies)
    rows = []
    for before, part in pairwise(PARTS):
        added = [(s.row(before).added_bytes - s.row(part).added_bytes) / MIB for s in cells]
        copied = [_copied(s.row(before)) - _copied(s.row(part)) for s in studies]
        fewer = [s.row(before).transfers / s.row(part).transfers for s in studies]
        rows.append((part.name, *_both(added, "{:.1f}"), *_both(copied, "{:.0f}"), *_both(fewer, "{:.1f}x")))
    last = PARTS[-1]
    kept = [(s.row(last).added_bytes - _executed(s)) / MIB for s in cells]
    rows.append(("as executed", *_both(kept, "{:.1f}", most=min), "", "", "", ""))
    return Table(SUMMARY, tuple(rows))


def _copied(row: Ablated) -> float:
    return 100 * row.snapshot_bytes / row.state_bytes


def _both(values: Sequence[float], text: str, most: Callable[[Sequence[float]], float] = max) -> tuple[str, str]:
    return text.format(median(values)), text.format(most(values))


def _executed(each: Study) -> int:
    """Bytes that the plan with all parts adds once it is moved to anchors."""
    return each.row(PARTS[-1]).executed_added_bytes or 0
