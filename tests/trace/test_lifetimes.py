"""Births, deaths, roles and writes of storages in cases that can be followed by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import FEATURES, batch, mlp

from checkflow import Training, models
from checkflow.graph import Graph, Role
from checkflow.graph import Tensor as Entry
from checkflow.trace import trace_training


def graph_of(factory: Callable[[], Training]) -> Graph:
    return trace_training(factory, model="m", cuda_defaults=False).graph


def named(graph: Graph, name: str) -> Entry:
    return next(tensor for tensor in graph.tensors if tensor.name == name)


def step_of(graph: Graph, operator: str, occurrence: int = 1) -> int:
    return [step for step, op in enumerate(graph.ops, start=1) if op.name == operator][occurrence - 1]


def line(loss: Callable[[nn.Linear, Tensor], Tensor], *, zero_first: bool = False) -> Callable[[], Training]:
    """A linear layer without bias under SGD."""

    def factory() -> Training:
        model, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
        sgd = optim.SGD(model.parameters(), 0.1, foreach=False)

        def iteration() -> None:
            if zero_first:
                sgd.zero_grad()
            torch.autograd.backward(loss(model, x))
            sgd.step()
            if not zero_first:
                sgd.zero_grad()

        return Training(model, sgd, iteration)

    return factory


def test_an_activation_lives_until_backward_has_used_it() -> None:
    """y = x W, a = exp(y): exp saves its result, whose backward frees it; y dies as soon as a exists."""
    graph = graph_of(line(lambda model, x: model(x).exp().sum()))
    assert [op.name for op in graph.ops] == [
        "aten.mm.default",
        "aten.exp.default",
        "aten.sum.default",
        "aten.ones_like.default",
        "aten.mul.Tensor",
        "aten.mm.default",
        "aten.add_.Tensor",
    ]
    lives = {t.name: (t.role, t.born, t.freed) for t in graph.tensors}
    assert lives == {
        "model/weight": (Role.PARAMETER, 0, 7),
        "%x": (Role.INPUT, 0, 7),
        "%mm_default": (Role.ACTIVATION, 1, 2),
        "%exp_default": (Role.ACTIVATION, 2, 5),
        "%sum_default": (Role.ACTIVATION, 3, 6),  # an argument of backward(), which holds it
        "%ones_like_default": (Role.ACTIVATION, 4, 6),
        "%mul_tensor": (Role.ACTIVATION, 5, 6),
        "%mm_default_1": (Role.GRADIENT, 6, 7),
    }
    assert graph.writes[0] == (7,)
    assert graph.resident_bytes[1] == 64 + 32 + 32 + 32


def test_gradients_kept_over_the_end_are_there_before_and_after() -> None:
    """zero_grad at the start drops the gradient of the iteration before; the new one lives to the end."""
    graph = graph_of(line(lambda model, x: model(x).sum(), zero_first=True))
    gradients = [(t.born, t.freed) for t in graph.tensors if t.role is Role.GRADIENT]
    assert gradients == [(0, 0), (step_of(graph, "aten.mm.default", 2), graph.steps)]


def test_gradients_zeroed_in_place_never_die() -> None:
    """set_to_none=False: one storage for each gradient, written by zeroing and by accumulation."""
    graph = graph_of(FEATURES["zero_grad_not_to_none"])
    kept = [i for i, t in enumerate(graph.tensors) if t.role is Role.GRADIENT and t.born == 0]
    assert len(kept) == 6
    assert all(graph.tensors[i].freed == graph.steps and graph.writes[i][0] == 1 for i in kept)


def test_a_loss_kept_by_the_user_dies_when_it_is_replaced() -> None:
    """The loss of the iteration before is resident until the new one takes its place; the new one stays."""
    graph = graph_of(FEATURES["loss_kept"])
    loss = step_of(graph, "aten.nll_loss_forward.default")
    old = [t for t in graph.tensors if t.role is Role.INPUT and not t.name.startswith("%loss_")]
    assert [(t.born, t.freed, t.size_bytes) for t in old] == [(0, loss, 4)]
    new = [graph.tensors[i] for i in graph.ops[loss - 1].writes]
    assert next(t.freed for t in new if t.size_bytes == 4) == graph.steps


def test_tied_weights_are_one_storage_with_two_names() -> None:
    """The optimizer knows it by the first name."""
    graph = graph_of(FEATURES["tied_weights"])
    tied = named(graph, "model/embed.weight")
    assert [view.name for view in tied.views] == ["model/embed.weight", "model/head.weight"]
    assert tied.size_bytes == 7 * 5 * 4 and tied.views[1].shape == (7, 5)
    assert named(graph, "optimizer/embed.weight.exp_avg").role is Role.OPTIMIZER
    assert sum(t.role is Role.PARAMETER for t in graph.tensors) == 1


def test_frozen_and_unused_parameters_are_state_that_is_not_written() -> None:
    """They are resident and need no checkpoint after the first."""
    graph = graph_of(FEATURES["frozen_and_unused"])
    written = {graph.tensors[i].name for i in graph.written_state}
    assert "model/used.0.weight" not in written and "model/unused.weight" not in written
    assert {"model/used.0.bias", "optimizer/used.0.bias.momentum_buffer"} <= written
    assert named(graph, "model/unused.weight").freed == graph.steps


def test_buffers_are_state_unless_they_are_not_persistent() -> None:
    """A buffer that state_dict leaves out is an input; a 0-dim one on the device is state like any other."""
    graph = graph_of(FEATURES["buffers_in_forward"])
    buffers = {t.name for t in graph.tensors if t.role is Role.BUFFER}
    assert buffers == {"model/mean", "model/count"}
    assert buffers <= {graph.tensors[i].name for i in graph.written_state}
    assert any(t.role is Role.INPUT and "ones" in t.name for t in graph.tensors)


@pytest.mark.parametrize("real", [False, True])
def test_batch_norm_writes_its_statistics_in_forward(real: bool) -> None:
    """The window of running_mean ends at the first batch norm operator, which is its first and last write."""
    traced = trace_training(FEATURES["half_precision"], model="m", real=real)
    graph = traced.graph
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    forward = step_of(graph, "aten.native_batch_norm.default")
    assert graph.writes[index["model/1.running_mean"]] == (forward,)
    assert graph.writes[index["model/1.running_var"]] == (forward,)
    assert graph.writes[index["model/1.num_batches_tracked"]] == (forward - 1,)
    assert graph.writes[index["model/0.weight"]][0] > step_of(graph, "aten.native_batch_norm_backward.default")


def test_host_steps_are_counted_and_cross_no_link() -> None:
    """Looped Adam keeps `step` on the host, four bytes for each parameter; fused Adam keeps it on the device."""

    def adam(fused: bool) -> Callable[[], Training]:
        def factory() -> Training:
            model, (x, y) = mlp(), batch()
            optimizer = optim.Adam(model.parameters(), fused=fused, foreach=False if not fused else None)

            def iteration() -> None:
                torch.autograd.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

            return Training(model, optimizer, iteration)

        return factory

    looped, fused = graph_of(adam(False)), graph_of(adam(True))
    assert (looped.host_state_bytes, fused.host_state_bytes) == (24, 0)
    assert not any(t.name.endswith(".step") for t in looped.tensors)
    steps = [i for i, t in enumerate(fused.tensors) if t.name.endswith(".step")]
    assert len(steps) == 6 and set(steps) <= set(fused.written_state)


def test_gradients_of_optimizer_in_backward_die_early() -> None:
    """Each update drops its gradient, and updates stand between backward's operators."""
    graph = graph_of(FEATURES["optimizer_in_backward"])
    gradients = [t for t in graph.tensors if t.role is Role.GRADIENT]
    assert len(gradients) == 6 and sum(t.freed < graph.steps for t in gradients) == 5
    first_update = min(steps[0] for i, steps in graph.writes.items() if graph.tensors[i].role is Role.PARAMETER)
    assert first_update < step_of(graph, "aten.native_batch_norm_backward.default")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An independent account of the bytes alive, for real tensors: no hooks, no ledger."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.references: list[weakref.ref[torch.UntypedStorage]] = []
        self.peak = 0

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.references.append(weakref.ref(storage, lambda _: self.alive.pop(key)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor):
                self.hold(value)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("name", ["alexnet", "resnet", "bert"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_foreach", "adamw_fused"])
def test_the_peak_is_that_of_an_independent_account(name: str, optimizer: str) -> None:
    """Bytes alive after each operator of a real iteration, counted without hooks, peak where the graph says."""
    factory = models.factory(name)
    graph = graph_of(lambda: factory(batch_size=2, optimizer=optimizer, small=True))
    training = factory(batch_size=2, optimizer=optimizer, small=True)
    training.iteration()
    gc.collect()
    watch = Watch()
    known = [t for model in training.models for t in (*model.parameters(), *model.buffers())]
    known += [
        t for o in training.optimizers for slots in o.state.values() for key, t in slots.items()
        if isinstance(t, Tensor) and not (key == "step" and optimizer == "adamw_foreach")
    ]  # fmt: skip
    for tensor in known:
        watch.hold(tensor)
    inputs = sum(t.size_bytes for t in graph.tensors if t.role is Role.INPUT)
    with watch:
        training.iteration()
    assert abs(watch.peak + inputs - graph.training_peak_bytes) <= 64  # host scalars of the foreach step
