"""The timeline as a picture: .png, or .html that stands alone. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.compiler import Compiled
from checkflow.jsonfile import check_output, write_bytes, write_text
from checkflow.report import style
from checkflow.report.terminal import rows_of
from checkflow.report.timeline import timeline_of
from checkflow.report.timeline_rows import draw_checkpoint, draw_link, draw_memory
from checkflow.units import format_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".png")


def check(path: Path) -> None:
    """Raise InputError, before any long work, where it could not be drawn or written."""
    check_output(path, SUFFIXES)
    with style.styled():
        pass  # without matplotlib, say so now


def write(path: Path, compiled: Compiled) -> None:
    """Draw a compiled schedule. Raises InputError for an unknown suffix, no matplotlib, or an unwritable path."""
    check(path)
    figure = draw(compiled)
    if path.suffix == ".png":
        png = io.BytesIO()
        figure.savefig(png, format="png")
        write_bytes(path, png.getvalue())
        return
    svg = io.StringIO()
    with style.styled():
        figure.savefig(svg, format="svg", metadata={"Date": None})
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows_of(compiled)
    )
    title = html.escape(f"checkflow: {compiled.graph.model} on {compiled.graph.device}")
    write_text(
        path,
        f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>body{{font:15px system-ui;max-width:70em;"
        "margin:2em auto;padding:0 1em}th{text-align:left;font-weight:500;padding-right:2em}td{font-variant-numeric:"
        "tabular-nums}svg{width:100%;height:auto}</style>"
        f"<h1>{title}</h1><table>{rows}</table>{svg.getvalue()[svg.getvalue().index('<svg') :]}",
    )


@style.styled()
def draw(compiled: Compiled) -> Figure:
    """Memory over time with the snapshots on top, the checkpoint's progress, link and anchors."""
    timeline, interval = timeline_of(compiled), compiled.problem.interval
    figure = style.new_figure(6.8)
    memory, checkpoint, link = figure.subplots(3, 1, sharex=True, height_ratios=[4, 2.6, 1.1])
    unit_ns, unit = style.time_unit(timeline.period_ns)
    draw_memory(memory, timeline, unit_ns)
    draw_checkpoint(checkpoint, timeline, unit_ns)
    draw_link(link, timeline, unit_ns)
    every = "every iteration" if interval == 1 else f"every {interval} iterations"
    rate = format_rate(compiled.schedule.bandwidth_bytes_per_s)
    figure.suptitle(
        f"{compiled.graph.model} on {compiled.graph.device}: a checkpoint {every}, over a link of {rate}",
        x=0.01,
        ha="left",
    )
    link.set_xlabel(f"time ({unit})")
    link.set_xlim(0, timeline.period_ns / unit_ns)
    for name, at_ns in timeline.phases:
        for axes in (memory, checkpoint):
            axes.axvline(at_ns / unit_ns, color=style.FAINT, linewidth=0.6)
        side, offset = ("right", -4) if at_ns > 0.9 * timeline.period_ns else ("left", 4)
        memory.annotate(name, (at_ns / unit_ns, 0.98), xycoords=("data", "axes fraction"), xytext=(offset, 0),
                        textcoords="offset points", va="top", ha=side, color=style.FAINT)  # fmt: skip
    return figure
