"""The rows of the timeline's picture: memory, what of a checkpoint is copied and what overwritten, and the link."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from checkflow.report import style
from checkflow.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 2001  # of the period, for the area between two curves


def draw_memory(axes: Axes, timeline: Timeline, unit_ns: float) -> None:
    """What training holds at each moment, and the snapshots on top."""
    unit_bytes, unit = style.byte_unit(max(timeline.memory_bytes))
    edges = [edge / unit_ns for edge in timeline.edges_ns]
    training = [size / unit_bytes for size in timeline.training_bytes]
    total = [size / unit_bytes for size in timeline.memory_bytes]
    axes.stairs(training, edges, fill=True, color=style.TRAINING, label="training")
    if total != training:
        axes.stairs(total, edges, baseline=training, fill=True, color=style.SNAPSHOT, label="snapshots")
    axes.axhline(max(training), color=style.PLAIN, linewidth=1, linestyle="--", label="peak of training alone")
    axes.set_ylabel(f"memory ({unit})")
    axes.set_ylim(0, max(total) * 1.18)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)


def draw_checkpoint(axes: Axes, timeline: Timeline, unit_ns: float) -> None:
    """One checkpoint's bytes summed up: those copied by each moment, and those whose live tensor is overwritten."""
    unit_bytes, unit = style.byte_unit(sum(span.size_bytes for span in timeline.spans))
    sizes = [0.0, *accumulate(span.size_bytes / unit_bytes for span in timeline.spans)]
    begins_and_ends = np.array([(span.begin_ns, span.end_ns) for span in timeline.spans]).ravel()
    left = np.repeat(sizes, 2)[1:-1]
    due_ns = np.array([at_ns for at_ns, _ in timeline.due])
    due = np.array([0.0, *accumulate(size / unit_bytes for _, size in timeline.due)])
    sampled_ns = np.linspace(0, timeline.period_ns, SAMPLES)
    for turn in (-1, 0, 1):  # the checkpoint before, which may still be on its way, this one, and the next
        shifted = begins_and_ends + turn * timeline.period_ns
        until_ns = max(shifted[-1], (turn + 1) * timeline.period_ns)
        axes.plot([*(shifted / unit_ns), until_ns / unit_ns], [*left, left[-1]], color=style.LIVE, linewidth=2,
                  alpha=0.3 if turn else 1.0, label="" if turn else "copied to the host")  # fmt: skip
        left_by = np.interp(sampled_ns, shifted, left, left=0.0, right=left[-1])
        due_by = due[np.searchsorted(due_ns + turn * timeline.period_ns, sampled_ns, side="right")]
        late = due_by > left_by + 1e-9
        label = "in a snapshot meanwhile" if late.any() and not turn else ""
        axes.fill_between(sampled_ns / unit_ns, left_by, due_by, where=late, color=style.SNAPSHOT, alpha=0.3,
                          linewidth=0, label=label)  # fmt: skip
    axes.step([0, *(due_ns / unit_ns), timeline.period_ns / unit_ns], [0, *due[1:], due[-1]], where="post",
              color=style.INK, linewidth=1.2, linestyle="--", label="overwritten by training")  # fmt: skip
    axes.set_ylabel(f"checkpoint ({unit})")
    axes.set_ylim(0, left[-1] * 1.12)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3)


def draw_link(axes: Axes, timeline: Timeline, unit_ns: float) -> None:
    """When the link is busy, with what, and where hooks run."""
    for held, color, label in (
        (False, style.LIVE, "from the live tensor"),
        (True, style.SNAPSHOT, "from a snapshot"),
    ):
        bars = [
            (begin / unit_ns, (end - begin) / unit_ns)
            for span in timeline.spans
            if (span.held_ns is not None) is held
            for begin, end in folded(span.begin_ns, span.end_ns, timeline)
        ]
        if bars:
            axes.broken_barh(bars, (1.2, 0.8), color=color, label=label)
    axes.vlines([at_ns / unit_ns for at_ns in timeline.anchors_ns], 0, 0.8, color=style.INK, linewidth=1)
    axes.set_yticks([0.4, 1.6], ["anchors", "link busy"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.1, 2.1)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.95), ncols=2)


def folded(begin_ns: float, end_ns: float, timeline: Timeline) -> list[tuple[float, float]]:
    """A span within the period: what leaves it at the end comes in again at its beginning."""
    period = timeline.period_ns
    begin = begin_ns % period
    end = begin + end_ns - begin_ns
    if end <= period:
        return [(begin, end)]
    return [(begin, period), (0.0, end - period)]
