"""The tortured training's schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import trainer_to_kill

from checkflow import hardware
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.schedule import write_schedule
from checkflow.trace import trace_training

ROLLING = "rolling.json"  # beside the other one


def compile_schedules(path: Path) -> int:
    """Over a link so narrow that some of it has to be snapshot; and one in lanes."""
    traced = trace_training(trainer_to_kill.training, model="tortured", cuda_defaults=False)
    graph = hardware.retime(traced.graph, hardware.load_profile("rtx3090"))
    options = Options(3_000_000_000, interval=1)
    for place, its in ((path, options), (path.with_name(ROLLING), replace(options, policy="rolling", lanes=3))):
        compiled = compile_graph(graph, its)
        assert isinstance(compiled, Compiled)
        write_schedule(place, compiled.schedule)
    return 0
