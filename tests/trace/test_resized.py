"""Tensors that an operator resizes, in its kernel too: what they are from then on is what a graph has of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from trainings import loop

from checkflow import Training
from checkflow.errors import TraceError
from checkflow.trace import trace_training

CHANNELS = 32


class Quantized(nn.Module):
    """As quantization-aware training has a weight: what is kept of each channel gets its size where it first runs."""

    observes: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self, *, observes: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, CHANNELS * 8).view(CHANNELS, 8))
        self.register_buffer("observes", torch.tensor([int(observes)]))
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("high", torch.tensor([]))
        self.register_buffer("scale", torch.tensor([1.0]))
        self.register_buffer("zero", torch.tensor([0], dtype=torch.int))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (self.low, self.high, self.scale, self.zero)
        quantize = torch.fused_moving_avg_obs_fake_quant
        weight = quantize(self.weight, self.observes, self.observes, *kept, 0.01, -128, 127, 0, True, True)
        return x @ weight.t()


def _quantized(*, before: bool, observes: bool = True) -> Training:
    model, x = Quantized(observes=observes), torch.ones(4, 8)
    if before:
        model(x)
    return loop(model, optim.SGD(model.parameters(), 0.1, foreach=False), lambda: model(x).square().mean())


@pytest.mark.parametrize("before", [True, False], ids=["in the factory", "in the first iteration"])
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_kernel_resizes_its_arguments(*, before: bool, real: bool) -> None:
    traced = trace_training(lambda: _quantized(before=before), model="m", real=real)
    kept = {view.name: (view.shape, tensor.size_bytes) for tensor in traced.graph.tensors for view in tensor.views}
    assert traced.real is real
    for name in ("low", "high", "scale", "zero"):
        assert kept[f"model/{name}"] == ((CHANNELS,), CHANNELS * 4), name


def test_a_kernel_that_does_not_observe_resizes_nothing() -> None:
    traced = trace_training(lambda: _quantized(before=True, observes=False), model="m")
    shapes = {view.name: view.shape for tensor in traced.graph.tensors for view in tensor.views}
    assert not traced.real and shapes["model/scale"] == (1,)


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("way", ["out=", "resize_"])
def test_what_an_iteration_resizes_counts_from_then_on(way: str, *, real: bool) -> None:
    def factory() -> Training:
        model, x = nn.Linear(16, 16), torch.ones(64, 16)

        def loss() -> torch.Tensor:
            kept = torch.empty(0)
            if way == "out=":
                torch.cat([x, x], out=kept)
            else:
                kept.resize_(128, 16).copy_(x.repeat(2, 1))
            return torch.mean(model(kept))

        return loop(model, optim.SGD(model.parameters(), 0.1, foreach=False), loss)

    graph = trace_training(factory, model="m", real=real).graph
    found = [tensor for tensor in graph.tensors if tensor.size_bytes == 128 * 16 * 4 and tensor.born]
    assert any(graph.ops[tensor.born - 1].name.startswith(("aten.resize_", "aten.cat.out")) for tensor in found)


def test_state_that_every_iteration_resizes_is_refused() -> None:
    def factory() -> Training:
        model, seen = nn.Linear(4, 4), torch.zeros(8)
        model.register_buffer("seen", seen)

        def loss() -> torch.Tensor:
            seen.resize_(seen.numel() + 8)
            return torch.mean(model(torch.ones(2, 4)))

        return loop(model, optim.SGD(model.parameters(), 0.1, foreach=False), loss)

    with pytest.raises(TraceError) as caught:
        trace_training(factory, model="m")
    assert str(caught.value) == (
        "m: the iteration resizes model/seen, from 64 to 96 bytes; make such a change in the factory, or in the first "
        "iteration"
    )
