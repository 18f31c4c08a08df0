"""Iteration times with and without checkpoints, as measured in turns, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median, quantiles
from typing import TYPE_CHECKING

from checkflow.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Turns = Sequence[Sequence[float]]  # seconds of each iteration, turn by turn; the turns of two sides alternate

ATTACHED = "a checkpoint at every iteration"


def ratios(plain: Turns, attached: Turns) -> tuple[float, float, float]:
    """Quartiles of attached over plain, over pairs of neighbouring turns, so that a drifting clock slows both sides.

    Needs at least two pairs.
    """
    low, middle, high = quantiles(
        [median(b) / median(a) for a, b in zip(plain, attached, strict=True)], method="inclusive"
    )
    return low, middle, high


@style.styled()
def draw(plain: Turns, attached: Turns) -> Figure:
    """Each iteration as a dot, in the order in which they ran (plain first; turns of equal length), with the medians.

    The axis ends at one and a half times the larger median: what lies above is drawn at its end, as a triangle.
    """
    figure = style.new_figure(4.2)
    axes = figure.subplots()
    sides = ((plain, "no checkpoints", style.PLAIN, "o"), (attached, ATTACHED, style.CHECKFLOW, "s"))
    top_ms = 1.5e3 * max(median(chain(*turns)) for turns, *_ in sides)
    for side, (turns, name, colour, marker) in enumerate(sides):
        length = len(turns[0])
        dots = [
            ((2 * turn + side) * length + number, 1e3 * time_s)
            for turn, times_s in enumerate(turns)
            for number, time_s in enumerate(times_s, start=1)
        ]
        median_ms = median(time_ms for _, time_ms in dots)
        axes.axhline(median_ms, color=colour, linewidth=1.2)
        axes.plot(
            *zip(*dots, strict=True), marker, color=colour, markersize=5, label=f"{name}: median {median_ms:.1f} ms"
        )
        if above := [number for number, time_ms in dots if time_ms > top_ms]:
            axes.plot(above, [top_ms] * len(above), "^", color=colour, markersize=7, clip_on=False)
    low, middle, high = (ratio - 1 for ratio in ratios(plain, attached))
    figure.suptitle(f"{ATTACHED.capitalize()}: iteration time {middle:+.1%}", x=0.01, ha="left")
    quartiles = f"median over pairs of neighbouring turns, half of which lie within {low:+.1%} and {high:+.1%}"
    axes.set_title(quartiles, fontsize=10, color=style.FAINT)
    axes.set_xlabel("iteration, in the order in which they ran")
    axes.set_ylabel("iteration time (ms)")
    axes.set_ylim(0, 1.04 * top_ms)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")
    return figure
