"""Replay against eager, used by several tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkflow import Training
from checkflow.state.live import parameters_of
from checkflow.trace import Traced, replay, trace_training
from checkflow.trace.state import state_of


def snapshot(training: Training) -> dict[str, torch.Tensor]:
    """A copy of every state tensor and gradient, by name."""
    found: dict[str, torch.Tensor] = {
        state.name: state.tensor.detach().clone() for state in state_of(training, "model")
    }
    for name, parameter in parameters_of(training):
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad.detach().clone()
    return found


def assert_replays(factory: Callable[[], Training], *, real: bool = False, falls_back: bool = False) -> Traced:
    """Trace, and check that the program leaves the bytes, gradients and random state that eager's iteration leaves."""
    torch.manual_seed(1)
    traced = trace_training(factory, model="m", real=real, cuda_defaults=False, program=True)
    assert traced.real is (real or falls_back), traced.notes
    torch.manual_seed(1)
    eager = factory()
    eager.iteration()
    before = snapshot(eager)
    torch.manual_seed(2)
    eager.iteration()
    eager_random = torch.get_rng_state()
    torch.manual_seed(1)
    replayed = factory()
    replayed.iteration()
    torch.manual_seed(2)
    replay(traced, replayed)
    assert torch.equal(torch.get_rng_state(), eager_random)
    expected, found = snapshot(eager), snapshot(replayed)
    assert list(expected) == list(found)
    wrong = [name for name in expected if not same_bytes(expected[name], found[name])]
    assert not wrong
    assert any(not same_bytes(before[name], expected[name]) for name in before), "the iteration changed nothing"
    check_unwritten(traced, before, expected)
    return traced


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes: NaN equals NaN, and 0.0 differs from -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))


def check_unwritten(traced: Traced, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """State whose bytes an eager iteration changes is state that the graph says is written."""
    graph = traced.graph
    written = {view.name for i in graph.written_state for view in graph.tensors[i].views}
    known = {view.name for tensor in graph.tensors for view in tensor.views}
    changed = {name for name in before if name in known and not same_bytes(before[name], after[name])}
    assert changed <= written
