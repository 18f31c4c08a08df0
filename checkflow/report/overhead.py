"""Iteration times with and without checkpoints, as measured in turns, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from checkflow.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Turns = Sequence[Sequence[float]]  # seconds of each iteration, turn by turn; the turns of two sides alternate


def ratio(plain: Turns, attached: Turns) -> float:
    """Attached over plain: the median of neighbouring turns' ratios, so that a drifting clock slows both sides."""
    return median(median(b) / median(a) for a, b in zip(plain, attached, strict=True))


@style.styled()
def draw(plain: Turns, attached: Turns) -> Figure:
    """Each iteration as a dot, in the order in which they ran, with each side's median.

    The axis ends at twice the larger median: what lies above is drawn at the edge as a triangle.
    """
    figure = style.new_figure(4.2)
    axes = figure.subplots()
    sides = (
        ("no checkpoints", style.PLAIN, plain, "o"),
        ("a checkpoint at every iteration", style.CHECKFLOW, attached, "s"),
    )
    medians_ms = [1e3 * median(time_s for turn in side for time_s in turn) for _, _, side, _ in sides]
    top_ms, count = 2 * max(medians_ms), 0
    for pair in zip(plain, attached, strict=True):
        for (_, colour, _, marker), turn in zip(sides, pair, strict=True):
            times_ms = [1e3 * time_s for time_s in turn]
            for number, time_ms in enumerate(times_ms, start=count + 1):
                high = time_ms > top_ms
                axes.plot(
                    number, min(time_ms, top_ms), "^" if high else marker, color=colour, markersize=5, clip_on=False
                )
            count += len(turn)
    for (name, colour, _, marker), median_ms in zip(sides, medians_ms, strict=True):
        axes.axhline(median_ms, color=colour, linewidth=1.2)
        axes.plot(
            [], [], marker, color=colour, linestyle="-", linewidth=1.2, label=f"{name}: median {median_ms:.1f} ms"
        )
    axes.set_title(
        f"What a checkpoint at every iteration costs: {ratio(plain, attached) - 1:+.1%} of the iteration time"
    )
    axes.set_xlabel("iteration, in the order in which they ran")
    axes.set_ylabel("iteration time (ms)")
    axes.set_ylim(0, top_ms)
    axes.set_xlim(0, count + 1)
    axes.legend(loc="lower right")
    return figure
