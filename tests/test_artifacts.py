"""The graphs and schedules that the repository carries are current, and every schedule verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkflow import hardware, models
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.graphfile import read_graph
from checkflow.schedule import read_schedule
from checkflow.trace import trace_training
from checkflow.verify import verify

ROOT = Path(__file__).parents[1]
NETWORKS = ("alexnet", "bert", "mnasnet", "resnet", "resnet3d", "transformer", "vgg", "vit")
CELLS = [(network, batch) for network in NETWORKS for batch in (1, 32)]


@pytest.mark.parametrize(("network", "batch"), CELLS)
def test_graph_is_what_tracing_gives_today(network: str, batch: int) -> None:
    """Tracing the bundled network again gives the same graph (make artifacts writes a new one)."""
    make = models.factory(network)
    traced = trace_training(lambda: make(batch_size=batch), model=network, arguments=(("batch_size", str(batch)),))
    timed = hardware.retime(traced.graph, hardware.load_profile("rtx3090"))
    assert timed == read_graph(ROOT / "graphs" / f"{network}-{batch}.json")


@pytest.mark.parametrize(("network", "batch"), CELLS)
def test_schedule_verifies_and_is_what_compiling_gives_today(network: str, batch: int) -> None:
    """Each schedule verifies against its graph, and compiling the graph again gives the same one."""
    graph = read_graph(ROOT / "graphs" / f"{network}-{batch}.json")
    schedule = read_schedule(ROOT / "schedules" / f"{network}-{batch}.json")
    verify(schedule, graph)
    compiled = compile_graph(graph, Options(63_000_000_000, interval=None))
    assert isinstance(compiled, Compiled)
    assert compiled.schedule == schedule
