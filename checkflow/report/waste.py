"""Wasted time over the mean time between failures, a line for each policy: .png or .svg. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.jsonfile import check_output, write_bytes
from checkflow.report import style
from checkflow.simulation.failures import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Point:
    mtbf_s: float  # of all devices together
    wasted: Spread  # share of the time


def check(path: Path) -> None:
    """Raise InputError, before any long work, where it could not be drawn or written."""
    check_output(path, SUFFIXES)
    with style.styled("--figure"):
        pass


def write(path: Path, lines: Mapping[str, Sequence[Point]], title: str) -> None:
    figure, content = draw(lines, title), io.BytesIO()
    with style.styled("--figure"):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(content, format=path.suffix[1:], metadata=metadata)
    write_bytes(path, content.getvalue())


@style.styled("--figure")
def draw(lines: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """Both axes are logarithmic; the band is the interval of the median."""
    figure = style.new_figure(5.2)
    axes = figure.subplots()
    for name, points in lines.items():
        ordered = sorted(points, key=lambda point: point.mtbf_s)
        hours = [point.mtbf_s / 3600 for point in ordered]
        (line,) = axes.plot(hours, [100 * point.wasted.median for point in ordered], marker=".", label=name)
        axes.fill_between(
            hours,
            [100 * point.wasted.low for point in ordered],
            [100 * point.wasted.high for point in ordered],
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )
    axes.set_xscale("log")
    if any(point.wasted.low > 0 for points in lines.values() for point in points):
        axes.set_yscale("log")
    axes.set_xlabel("mean time between failures of all devices (h)")
    axes.set_ylabel("time wasted (%)")
    axes.legend()
    figure.suptitle(title, x=0.01, ha="left")
    return figure
