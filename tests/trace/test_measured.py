"""Costs of operators, counted and measured."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn, optim
from trainings import FEATURES, loop

from checkflow import Training
from checkflow.errors import TraceError
from checkflow.trace import trace_training


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
