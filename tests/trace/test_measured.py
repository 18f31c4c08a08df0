"""Costs of operators, counted and measured."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import nn, optim
from trainings import FEATURES, loop

from checkflow import Training
from checkflow.errors import TraceError
from checkflow.trace import live, trace_training
from checkflow.trace.assemble import check_graph
from checkflow.trace.live import recorded
from checkflow.trace.recorder import Recorder
from checkflow.trace.scratch import ScratchMeter


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


@pytest.mark.parametrize(
    ("anew", "found", "taken"),
    [
        (True, [(100, 100, 500), (110, 140, 540)], 30),  # asked for 40, of which 10 stay
        (True, [(110, 110, 540), (90, 110, 540)], 0),  # frees what was there before
        (True, [(100, 100, 500), (100, 130, 560)], 30),  # 30 twice, one after the other
        (False, [(100, 900, 500), (110, 900, 540)], 30),  # memory was fuller elsewhere
        (False, [(100, 900, 500), (100, 900, 560)], 60),  # which hides that it is twice 30
        (False, [(100, 145, 500), (100, 145, 560)], 45),  # or part of that
    ],
)
def test_scratch_is_what_is_freed_again(
    monkeypatch: pytest.MonkeyPatch, anew: bool, found: list[tuple[int, int, int]], taken: int
) -> None:
    """Each case has memory now, its peak, and all that was ever asked for; before an operator and after it."""
    begun: list[None] = []
    told = [dict(zip(("current", "peak", "allocated"), each, strict=True)) for each in found]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: begun.append(None))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {"requested_bytes": {"all": told.pop(0)}})
    meter = ScratchMeter(anew=anew)
    meter.start()
    assert meter.stop()() == taken
    assert bool(begun) == anew


def test_scratch_is_not_known_of_an_allocator_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    meter = ScratchMeter(anew=False)

    def knows_nothing(_: object) -> dict[str, object]:
        return {}

    for stats in (refuses, knows_nothing):
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
        meter.start()
        assert meter.stop()() == 0


def test_what_is_recorded_of_a_running_training_has_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: each operator is asked for, here by an allocator that gave 7 bytes and took them back."""

    def recorder(ledger: Any, fake: Any, values: Any, stopwatch: Any, _: object, *rest: Any) -> Recorder:
        return Recorder(ledger, fake, values, stopwatch, ScratchMeter(anew=False), *rest)

    plain = recorded(embedding(), "m")
    asked = itertools.count(step=7)
    monkeypatch.setattr(live, "Recorder", recorder)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda _: {"requested_bytes": {"all": {"current": 0, "peak": 1000, "allocated": next(asked)}}},
    )
    taken = recorded(embedding(), "m")
    check_graph(taken)
    assert taken.resident_bytes == tuple(size_bytes + 7 for size_bytes in plain.resident_bytes)


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


def convolutions() -> Training:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 5), nn.ReLU()).cuda()
    x = torch.randn(32, 3, 64, 64, device="cuda")
    return loop(model, optim.SGD(model.parameters(), 0.1, momentum=0.9), lambda: model(x).sum())


def requested(when: str) -> int:
    found: int = torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"][when]
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["traced", "recorded", "recorded, more was asked for once"])
def test_the_peak_of_a_graph_made_on_cuda_is_the_one_that_the_allocator_is_asked_for(how: str) -> None:
    """To the byte, with what cuDNN takes for itself; of a running training, whose peaks go on, never less."""
    torch.cuda.reset_peak_memory_stats()
    if how == "traced":
        graph = trace_training(convolutions, model="m", measure=True).graph
    else:
        once = torch.empty(2**31 if "once" in how else 0, dtype=torch.uint8, device="cuda")
        del once
        before = requested("peak")
        graph = recorded(convolutions(), "m")
        assert requested("peak") >= before
    gc.collect()
    held = requested("current")
    training = convolutions()
    training.iteration()
    torch.cuda.reset_peak_memory_stats()
    training.iteration()
    assert any(tensor.name.startswith("%scratch_") for tensor in graph.tensors)
    over = graph.training_peak_bytes / (requested("peak") - held)
    assert over >= 1 if "once" in how else over == 1
