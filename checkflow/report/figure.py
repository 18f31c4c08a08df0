"""The timeline as a picture: .png, or .html that stands alone. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import html
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.compiler import Compiled
from checkflow.errors import InputError
from checkflow.jsonfile import write_bytes, write_text
from checkflow.report.terminal import rows_of
from checkflow.report.timeline import Timeline, timeline_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".png")


def check_output(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise InputError, before any long work, where an output could not be written, or has none of the suffixes."""
    if suffixes and path.suffix not in suffixes:
        raise InputError(f"{path}: its name has to end in {' or '.join(suffixes)}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written, its folder is missing or not writable; choose another output")
    if suffixes == SUFFIXES:
        _figure_class()


def write(path: Path, compiled: Compiled) -> None:
    """Draw a compiled schedule. Raises InputError for an unknown suffix, no matplotlib, or an unwritable path."""
    check_output(path, SUFFIXES)
    figure = draw(compiled)
    if path.suffix == ".png":
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
        write_bytes(path, png.getvalue())
        return
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
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


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--report: needs matplotlib; install checkflow[plot]") from None
    return Figure


def draw(compiled: Compiled) -> Figure:
    """Memory over time with the snapshots on top, the link's use under it."""
    timeline = timeline_of(compiled)
    figure = _figure_class()(figsize=(11, 5.5), layout="constrained")
    memory, link = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    edges = [edge / 1e6 for edge in timeline.edges_ns]
    training = [size / 2**30 for size in timeline.training_bytes]
    total = [size / 2**30 for size in timeline.memory_bytes]
    memory.stairs(training, edges, fill=True, color="#9db8d9", label="training")
    memory.stairs(total, edges, baseline=training, fill=True, color="#d95f02", label="snapshots")
    memory.axhline(max(training), color="#30507a", linewidth=0.8, linestyle="--", label="training peak")
    memory.set_ylabel("GPU memory (GiB)")
    memory.set_ylim(0, max(total) * 1.18)
    memory.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    for name, at_ns in timeline.phases:
        memory.axvline(at_ns / 1e6, color="#888888", linewidth=0.6)
        memory.annotate(name, (at_ns / 1e6, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                        textcoords="offset points", va="top", color="#555555")  # fmt: skip
    for held, color, label in ((False, "#1b9e77", "from the live tensor"), (True, "#d95f02", "from a snapshot")):
        bars = [
            bar
            for span in timeline.spans
            if (span.held_ns is not None) is held
            for bar in folded(span.begin_ns, span.end_ns, timeline)
        ]
        link.broken_barh([(begin / 1e6, (end - begin) / 1e6) for begin, end in bars], (0, 1), color=color, label=label)
    link.set_yticks([])
    link.set_ylabel("link")
    link.set_xlabel(f"time (ms), one checkpoint every {compiled.problem.interval} iteration(s)")
    link.set_xlim(0, timeline.period_ns / 1e6)
    link.set_ylim(0, 1.9)  # the legend stands above the bars
    link.legend(loc="upper right", ncols=2, frameon=False)
    return figure


def folded(begin_ns: float, end_ns: float, timeline: Timeline) -> list[tuple[float, float]]:
    """A span within the period: what leaves it at the end comes in again at its beginning."""
    period = timeline.period_ns
    begin = begin_ns % period
    end = begin + end_ns - begin_ns
    if end <= period:
        return [(begin, end)]
    return [(begin, period), (0.0, end - period)]
