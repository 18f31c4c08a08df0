"""MODEL -> Graph with times: a traced graph's file as it is, anything else by tracing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkflow import hardware, sources, trace
from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.graphfile import read_graph

MEASURE = "measure"


@dataclass(frozen=True)
class TimedGraph:
    graph: Graph
    link_bytes_per_s: int  # of the device, where --bandwidth does not say otherwise
    memory_bytes: int | None  # of the device, None where it is not known
    notes: tuple[str, ...]
    trace_s: float


def traced(
    model: str, settings: dict[str, str], device: str, *, real: bool, progress: Callable[[str], None]
) -> TimedGraph:
    """Trace MODEL (or read its graph) and give its operators their times on a device."""
    started = time.perf_counter()
    profile = None if device == MEASURE else hardware.load_profile(device)
    notes: tuple[str, ...] = ()
    if model.endswith(".json"):
        if settings or device == MEASURE or real:
            raise InputError(
                f"{model}: is a traced graph; --set, --batch-size, --real and --device measure need a model"
            )
        graph = read_graph(Path(model))
    else:
        source = sources.load(model, settings)
        result = trace.trace_training(
            source.factory,
            model=source.name,
            arguments=source.arguments,
            real=real,
            measure=device == MEASURE,
            progress=progress,
        )
        graph, notes = result.graph, result.notes
    if profile is None:
        progress("measuring the link")
        profile = hardware.measure_profile("here", graph.traced_on, progress=progress)
    else:
        graph = hardware.retime(graph, profile)
    return TimedGraph(
        graph,
        hardware.link_bytes_per_s(profile),
        profile.memory_bytes,
        notes,
        time.perf_counter() - started,
    )
