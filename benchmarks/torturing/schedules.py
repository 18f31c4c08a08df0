"""The tortured training's schedule."""

from __future__ import annotations

from pathlib import Path

import trainer_to_kill

from checkflow import hardware
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.schedule import write_schedule
from checkflow.trace import trace_training


def compile_schedule(path: Path) -> int:
    """Over a link so narrow that some of it has to be snapshot."""
    traced = trace_training(trainer_to_kill.training, model="tortured", cuda_defaults=False)
    graph = hardware.retime(traced.graph, hardware.load_profile("rtx3090"))
    compiled = compile_graph(graph, Options(3_000_000_000, interval=1))
    assert isinstance(compiled, Compiled)
    write_schedule(path, compiled.schedule)
    return 0
