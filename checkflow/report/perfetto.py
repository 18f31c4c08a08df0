"""The timeline as a Chrome trace (the JSON that Chrome's tracing page and Perfetto open)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from checkflow.compiler import Compiled
from checkflow.jsonfile import write_text
from checkflow.report.timeline import LinkUse, Timeline, timeline_of

COMPUTE, LINK, SNAPSHOTS = 1, 2, 3


def write(path: Path, compiled: Compiled) -> None:
    """Write operators, snapshots, offloads and memory of one period. Raises InputError where it cannot be written."""
    write_text(path, json.dumps({"traceEvents": _events(compiled), "displayTimeUnit": "ms"}))


def _events(compiled: Compiled) -> list[dict[str, object]]:
    timeline = timeline_of(compiled)
    names = {COMPUTE: "operators", LINK: "offloads", SNAPSHOTS: "snapshots"}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}} for tid, name in names.items()
    ]
    ops = compiled.graph.ops
    edges = timeline.edges_ns
    step = 0
    for index, (begin, end) in enumerate(pairwise(edges)):
        if index == timeline.pause:
            events.append(_complete("pause", COMPUTE, begin, end, {}))
        else:
            step += 1
            events.append(_complete(ops[(step - 1) % len(ops)].name, COMPUTE, begin, end, {"step": step}))
        events.append(_memory(timeline, index, begin))
    for span in timeline.spans:
        events += _transfer(span, len(events))
    return events


def _transfer(span: LinkUse, number: int) -> list[dict[str, object]]:
    arguments: dict[str, object] = {"bytes": span.size_bytes, "direct": span.held_ns is None}
    events = [_complete(span.name, LINK, span.begin_ns, span.end_ns, arguments)]
    if span.held_ns is not None:
        # Snapshots overlap, so each is an asynchronous pair of its own.
        for phase, at_ns in zip("be", span.held_ns, strict=True):
            events.append(
                {
                    "ph": phase,
                    "cat": "snapshot",
                    "id": number,
                    "pid": 1,
                    "tid": SNAPSHOTS,
                    "name": span.name,
                    "ts": at_ns / 1e3,
                    "args": arguments,
                }
            )
    return events


def _complete(name: str, tid: int, begin_ns: float, end_ns: float, arguments: dict[str, object]) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "name": name,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "args": arguments,
    }


def _memory(timeline: Timeline, step: int, at_ns: int) -> dict[str, object]:
    training, total = timeline.training_bytes[step], timeline.memory_bytes[step]
    return {
        "ph": "C",
        "pid": 1,
        "name": "GPU memory (bytes)",
        "ts": at_ns / 1e3,
        "args": {"training": training, "snapshots": total - training},
    }
