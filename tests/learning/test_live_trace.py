"""What is recorded of a training that runs is what a trace of its factory has, and it changes nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checkflow import sources
from checkflow.trace import trace_training
from checkflow.trace.live import LiveIteration, recorded

SMALL = [
    ("gpt2", {"small": "true"}),
    ("gpt2", {"small": "true", "optimizer": "adamw"}),
    ("bert", {"small": "true", "optimizer": "momentum"}),
    ("resnet", {"small": "true", "optimizer": "adamw"}),
    ("mnasnet", {"small": "true", "optimizer": "momentum"}),
    ("vit", {"small": "true"}),
    ("resnet3d", {"small": "true", "optimizer": "adamw"}),
]


@pytest.mark.parametrize(("model", "settings"), SMALL, ids=lambda value: str(value))
def test_it_is_what_a_trace_ahead_has(model: str, settings: dict[str, str]) -> None:
    """Operators, what they read and write, sizes and lifetimes, anchors: all of it, but for names and times."""
    source = sources.load(model, settings)
    ahead = trace_training(source.factory, model=source.name, cuda_defaults=False).graph
    live = recorded(source.factory(), "live")
    assert [op.name for op in live.ops] == [op.name for op in ahead.ops]
    assert live.resident_bytes == ahead.resident_bytes
    assert live.anchors == ahead.anchors
    assert [(live.tensors[i].name, live.writes[i]) for i in live.written_state] == [
        (ahead.tensors[i].name, ahead.writes[i]) for i in ahead.written_state
    ]
    assert Counter(op.flops for op in live.ops) == Counter(op.flops for op in ahead.ops)
    assert all(op.time_ns > 0 for op in live.ops)


def test_what_is_recorded_computes_what_it_would_have() -> None:
    """Bit for bit."""
    factory = sources.load("gpt2", {"small": "true", "optimizer": "adamw"}).factory
    torch.manual_seed(1)
    plain = factory()
    for _ in range(5):
        plain.iteration()
    torch.manual_seed(1)
    watched = factory()
    recorded(watched, "live")
    watched.iteration()
    watched.iteration()
    for one, other in zip(plain.models[0].parameters(), watched.models[0].parameters(), strict=True):
        assert torch.equal(one, other)


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A user's own mode."""

    def __torch_dispatch__(self, func: Callable[..., object], types: object, args=(), kwargs=None) -> object:  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_a_mode_that_was_entered_since_is_left_first() -> None:
    """It would be taken off in place of ours; so ours stays, and sees nothing, until it can be taken off."""
    training = sources.load("gpt2", {"small": "true"}).factory()
    training.iteration()
    live = LiveIteration(training, "live", {}, {})
    training.iteration()
    users = Passing()  # type: ignore[no-untyped-call]
    with users:
        assert live.end({}) is None
        training.iteration()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is users
    assert live.abandon()
    assert live.abandon()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_checkflows_own_operators_are_not_recorded() -> None:
    """Copies that hooks make are no part of the iteration."""
    training = sources.load("gpt2", {"small": "true"}).factory()
    inside = [False]
    training.iteration()
    live = LiveIteration(training, "live", {}, {}, lambda: inside[0])
    training.iteration()
    inside[0] = True
    torch.ones(5).erfinv_()
    inside[0] = False
    torch.ones(5).digamma_()
    graph = live.end({})
    assert graph is not None
    names = {op.name for op in graph.ops}
    assert "aten.digamma_.default" in names
    assert "aten.erfinv_.default" not in names


def test_a_loaders_worker_is_not_recorded() -> None:
    """It is forked within an iteration, and would have the recorder see each of its operators for an epoch."""
    training = sources.load("gpt2", {"small": "true"}).factory()
    training.iteration()
    live = LiveIteration(training, "live", {}, {})
    child = os.fork()
    if not child:
        os._exit(0 if torch.utils._python_dispatch._get_current_dispatch_mode() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    training.iteration()
    graph = live.end({})
    assert graph is not None
    assert graph.steps > 100
