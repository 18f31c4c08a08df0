"""What the pictures show is what the schedule does."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation import overhead
from evaluation.page import Picture

from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graphfile import read_graph
from checkflow.report import figure
from checkflow.report.timeline import Timeline, timeline_of

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
CASES = {"in time": ("alexnet-32", 63), "late": ("alexnet-32", 20), "every few iterations": ("alexnet-1", 20)}


def _compiled(case: str) -> Compiled:
    name, gigabytes_per_s = CASES[case]
    compiled = compile_graph(read_graph(GRAPHS / f"{name}.json"), Options(gigabytes_per_s * 10**9, interval=None))
    assert isinstance(compiled, Compiled)
    return compiled


def _copied(timeline: Timeline, at_ns: float) -> float:
    """Bytes of this checkpoint that have crossed the link by then."""
    return sum(
        span.size_bytes * min(1.0, max(0.0, (at_ns - span.begin_ns) / (span.end_ns - span.begin_ns)))
        for span in timeline.spans
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_overwritten_before_it_is_copied_is_in_a_snapshot(case: str) -> None:
    """At each deadline the bytes that are due and not yet copied are in snapshots, and are all of them at the last."""
    compiled = _compiled(case)
    timeline = timeline_of(compiled)
    assert sum(size for _, size in timeline.due) == sum(span.size_bytes for span in timeline.spans)
    due, snapshots = 0, compiled.schedule.certificate.snapshot_bytes
    assert (snapshots > 0) is (case != "in time")
    for at_ns, size_bytes in timeline.due:
        due += size_bytes
        held = sum(
            span.size_bytes for span in timeline.spans if span.held_ns and span.held_ns[0] <= at_ns < span.held_ns[1]
        )
        assert due - _copied(timeline, at_ns) <= held + 1
    assert max(0.0, due - _copied(timeline, timeline.due[-1][0])) <= snapshots + 1


def test_anchors_repeat_with_each_iteration_of_the_period() -> None:
    """With a checkpoint every k iterations the picture has k times the anchors, up to the period's end."""
    compiled = _compiled("every few iterations")
    timeline, interval = timeline_of(compiled), compiled.problem.interval
    assert interval > 1
    assert len(timeline.anchors_ns) == interval * len(compiled.graph.anchors)
    assert timeline.anchors_ns[-1] == timeline.period_ns


def test_a_picture_of_the_same_schedule_is_the_same_file() -> None:
    """Nothing of the moment or of what was drawn before is in it."""
    compiled = _compiled("late")
    first, again = (Picture.of(figure.draw(compiled)) for _ in range(2))
    assert first.png.startswith(b"\x89PNG") and first == again


def test_the_cost_is_of_neighbouring_turns() -> None:
    """A machine that becomes ten times slower midway does not change what attached turns cost more: a tenth."""
    plain = [[1.0, 1.0, 9.0], [1.0, 1.0, 1.0], [10.0, 10.0, 10.0], [10.0, 10.0, 10.0]]
    attached = [[1.1, 1.1, 1.1], [1.1, 1.1, 1.1], [11.0, 11.0, 99.0], [11.0, 11.0, 11.0]]
    assert overhead.ratios(plain, attached) == pytest.approx((1.1, 1.1, 1.1))
    assert overhead.draw(plain, attached).get_suptitle().endswith("+10.0%")
