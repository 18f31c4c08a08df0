"""What code does where no recorder looks: in other threads, in destructors, and outside of any mode."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from checkflow import Training
from checkflow.errors import TraceError
from checkflow.torch_internals import innermost_mode
from checkflow.trace import trace_training
from checkflow.trace.live import recorded


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def training_of(part: str) -> Training:
    """One part of its iteration runs in a thread of its own; "" for none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("count", torch.zeros(3))
    sgd, loss = optim.SGD(model.parameters(), 0.1), [torch.zeros(())]

    def forward() -> None:
        loss[0] = model(torch.ones(8, 4)).sum()

    def count() -> None:
        model.get_buffer("count").add_(1)
        model.get_buffer("count")[3:].add_(1)  # no element: it is counted as a write, and none

    def backward() -> None:
        torch.autograd.backward(loss)

    def iteration() -> None:
        for act in (count, forward, backward, sgd.step):
            if act.__name__ == part:
                in_thread(act)
            else:
                act()
        sgd.zero_grad()

    return Training(model, sgd, iteration)


SAID = {
    "forward": "the iteration uses another thread for model, where no operator is recorded; ",
    "backward": "the iteration uses another thread for model/1.weight, where no operator is recorded; ",
    "step": "the iteration uses another thread for optimizer, where no operator is recorded; ",
    "count": "model/count is written, and no operator shows where: by another thread or process, ",
}


@pytest.mark.parametrize("part", SAID)
@pytest.mark.parametrize("how", ["fake", "real", "live"])
def test_what_another_thread_does_is_in_no_graph(part: str, how: str) -> None:
    """A plan would take what is written there for state that never changes."""
    with pytest.raises(TraceError) as caught:
        if how == "live":
            recorded(training_of(part), "net.py")
        else:
            trace_training(lambda: training_of(part), model="net.py", real=how == "real")
    assert str(caught.value).startswith(f"net.py: {SAID[part]}")


@pytest.mark.parametrize("real", [False, True])
def test_nothing_is_missing_where_one_thread_does_it_all(real: bool) -> None:
    graph = trace_training(lambda: training_of(""), model="net.py", real=real).graph
    assert {"model/count", "model/1.running_mean"} <= {v.name for i in graph.writes for v in graph.tensors[i].views}


def test_a_write_of_no_element_is_none() -> None:
    """A queue that is full takes an empty rest."""

    def factory() -> Training:
        model = nn.Linear(4, 4)
        model.register_buffer("queue", torch.zeros(8))
        sgd = optim.SGD(model.parameters(), 0.1)

        def iteration() -> None:
            model.get_buffer("queue")[8:] = torch.ones(0)
            torch.autograd.backward(model(torch.ones(8, 4)).sum())
            sgd.step()
            sgd.zero_grad()

        return Training(model, sgd, iteration)

    assert trace_training(factory, model="net.py").graph.steps
    assert recorded(factory(), "net.py").steps


class _Half:
    def __init__(self) -> None:
        self.value = torch.empty((), dtype=torch.int64).random_().item()  # an attempt on fake tensors ends here
        self.whole = True

    def __del__(self) -> None:
        assert self.whole


def test_nobody_is_told_that_half_an_object_of_an_attempt_given_up_cannot_be_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a loader's iterator that starts workers is one."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def factory() -> Training:
        half = _Half()
        model = nn.Linear(4, 4)
        sgd = optim.SGD(model.parameters(), 0.1)

        def iteration() -> None:
            if half.whole:
                torch.autograd.backward(model(torch.ones(8, 4)).sum())
                sgd.step()
                sgd.zero_grad()

        return Training(model, sgd, iteration)

    assert trace_training(factory, model="net.py").graph.steps
    gc.collect()
    assert sys.unraisablehook == told.append and told == []


@pytest.mark.parametrize("runs", [True, False])
def test_only_code_that_fails_where_nobody_records_is_to_be_corrected(runs: bool) -> None:
    def factory() -> Training:
        training = training_of("")

        def iteration() -> None:
            if not runs or innermost_mode() is not None:
                raise RuntimeError("no such thing")
            training.iteration()

        return Training(training.models[0], training.optimizers[0], iteration)

    says = "it runs where nobody records it, so leave it as it is and attach without a schedule"
    with pytest.raises(TraceError, match=says if runs else "; correct it there$"):
        trace_training(factory, model="net.py")


@pytest.mark.parametrize("size", [10**20, 10**14])
def test_what_is_too_large_is_to_be_smaller(size: int) -> None:
    """And torch's own backtrace is nothing that a user reads."""

    def factory() -> Training:
        model = nn.Linear(4, 4)
        return Training(model, optim.SGD(model.parameters(), 0.1), lambda: torch.randn(size, 4))

    given = (("batch_size", str(size)), ("name", "x"))
    with pytest.raises(TraceError) as caught:
        trace_training(factory, model="net.py", arguments=given, real=True)
    assert str(caught.value).endswith(f"; give a smaller value than batch_size={size}")
    assert not any(word in str(caught.value) for word in ("frame #", "raised from", "enforce"))
