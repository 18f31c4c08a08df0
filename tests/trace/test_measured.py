"""Costs of operators, counted and measured."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn, optim
from trainings import FEATURES, loop

from checkflow import Training
from checkflow.errors import TraceError
from checkflow.trace import trace_training
from checkflow.trace.assemble import check_graph
from checkflow.trace.measure import ScratchMeter


def embedding() -> Training:
    model, words = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 16)), torch.randint(0, 1000, (5,))
    return loop(model, optim.SGD(model.parameters(), 0.1), lambda: model(words).sum())


def test_flops_traffic_and_dtype() -> None:
    """A matrix product by its shapes; a lookup by the rows it reads; an expanded view by what lies behind it."""
    ops = {op.name: op for op in trace_training(embedding, model="m", cuda_defaults=False).graph.ops}
    product = ops["aten.addmm.default"]
    assert (product.flops, product.dtype) == (2 * 5 * 8 * 16, "float32")
    assert product.traffic_bytes == 4 * (16 + 5 * 8 + 8 * 16 + 5 * 16)
    assert ops["aten.embedding.default"].traffic_bytes == 4 * (5 * 8 + 5 * 8) + 8 * 5
    assert ops["aten.sum.dim_IntList"].traffic_bytes == 4 * (1 + 16)  # its input is one expanded element
    assert ops["aten.ones_like.default"].traffic_bytes == 4


def test_measured_times_are_of_this_machine() -> None:
    """Every step has a time, the graph says that it was measured, and hooks changed no operator."""
    traced = trace_training(FEATURES["tied_weights"], model="m", measure=True)
    assert traced.real and traced.graph.device == "measured"
    assert all(op.time_ns > 0 for op in traced.graph.ops)
    assert traced.graph.ops[0].name == "aten.embedding.default"


def test_measuring_needs_iterations_that_repeat() -> None:
    """An iteration whose operators change each time has no median."""

    def factory() -> Training:
        model, x, count = nn.Linear(4, 4), torch.randn(2, 4), itertools.count()

        def loss() -> torch.Tensor:
            y: torch.Tensor = model(x)
            for _ in range(next(count)):
                y = y + 1
            return y.sum()

        return loop(model, optim.SGD(model.parameters(), 0.1), loss)

    with pytest.raises(TraceError, match="only 0 of 21 iterations ran the recorded operators"):
        trace_training(factory, model="m", measure=True)


def test_scratch_is_the_most_beyond_what_is_there_around_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 40 bytes, 10 of which stay; another one leaves less than it found."""
    found = [{"current": 100, "peak": 0}, {"current": 110, "peak": 140}, {"current": 110}, {"current": 90, "peak": 110}]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: {"requested_bytes": {"all": found.pop(0)}})
    meter = ScratchMeter()
    taken = []
    for _ in range(2):
        meter.start()
        taken.append(meter.stop()())
    assert taken == [30, 0]


def test_scratch_is_there_during_its_operator_alone() -> None:
    """So it raises the peak where it is taken at the peak, and nowhere else."""
    graph = trace_training(embedding, model="m", cuda_defaults=False).graph
    peak, step = graph.training_peak_bytes, graph.resident_bytes.index(graph.training_peak_bytes) + 1
    sizes = [0] * graph.steps
    sizes[step - 1] = 1000
    taken = graph.with_scratch(sizes)
    check_graph(taken)
    assert taken.training_peak_bytes == peak + 1000
    assert [now - then for now, then in zip(taken.resident_bytes, graph.resident_bytes, strict=True)] == sizes
    assert graph.with_scratch([0] * graph.steps) == graph


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_that_is_traced_on_cuda_is_the_one_that_the_allocator_is_asked_for() -> None:
    """To the byte, with what cuDNN takes for itself."""

    def factory() -> Training:
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 5), nn.ReLU()).cuda()
        x = torch.randn(32, 3, 64, 64, device="cuda")
        return loop(model, optim.SGD(model.parameters(), 0.1, momentum=0.9), lambda: model(x).sum())

    def requested(when: str) -> int:
        found: int = torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"][when]
        return found

    graph = trace_training(factory, model="m", measure=True).graph
    gc.collect()
    held = requested("current")
    training = factory()
    training.iteration()
    torch.cuda.reset_peak_memory_stats()
    training.iteration()
    assert any(tensor.name.startswith("%scratch_") for tensor in graph.tensors)
    assert requested("peak") - held == graph.training_peak_bytes
