"""The program, replayed on real tensors, leaves the same bytes as eager PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from data_dependent import DATA_DEPENDENT
from replaying import assert_replays
from torch import nn, optim
from trainings import FEATURES, classify, mlp

from checkflow import Training, models
from checkflow.errors import TraceError
from checkflow.trace import replay, trace_training

Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1, foreach=False),
    "sgd_foreach": partial(optim.SGD, lr=0.1, foreach=True, weight_decay=0.01),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "momentum_fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, foreach=False),
    "adam_foreach": partial(optim.Adam, foreach=True, amsgrad=True),
    "adam_fused": partial(optim.Adam, fused=True, amsgrad=True),
    "adamw": partial(optim.AdamW, foreach=False),
    "adamw_foreach": partial(optim.AdamW, foreach=True),
    "adamw_fused": partial(optim.AdamW, fused=True),
    "adagrad": partial(optim.Adagrad, foreach=False),
    "adagrad_foreach": partial(optim.Adagrad, foreach=True),
    "adagrad_fused": partial(optim.Adagrad, fused=True),
    "rmsprop": partial(optim.RMSprop, foreach=False),
    "rmsprop_foreach": partial(optim.RMSprop, foreach=True, momentum=0.5, centered=True),
    "nadam": partial(optim.NAdam, foreach=False),
    "nadam_foreach": partial(optim.NAdam, foreach=True),
    "radam": partial(optim.RAdam, foreach=False),
    "radam_foreach": partial(optim.RAdam, foreach=True),
    "adamax_foreach": partial(optim.Adamax, foreach=True),
    "asgd_foreach": partial(optim.ASGD, foreach=True),
    "rprop_foreach": partial(optim.Rprop, foreach=True),
    "adadelta_foreach": partial(optim.Adadelta, foreach=True),
}
NETWORKS = ("alexnet", "bert", "mnasnet", "resnet", "resnet3d", "transformer", "vgg", "vit")

# Torch's shape functions differ from the CPU kernels: batch norm's saved statistics in bfloat16, the RNN's workspace.
FAKE_SIZES_DIFFER = ("autocast", "half_precision", "recurrent")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    """One iteration with each optimizer, recorded on fake tensors, replays bit for bit."""

    def factory() -> Training:
        model = mlp()
        return classify(model, OPTIMIZERS[name](model.parameters()))

    assert_replays(factory)


def test_muon_with_adamw() -> None:
    """Muon for the matrices and AdamW for the rest, side by side."""

    def factory() -> Training:
        model = mlp()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return classify(model, [optim.Muon(matrices), optim.AdamW(rest, foreach=False)])

    traced = assert_replays(factory)
    names = {tensor.name for tensor in traced.graph.tensors}
    assert {"optimizer.0/0.weight.momentum_buffer", "optimizer.1/0.bias.exp_avg"} <= names


def test_a_batch_that_comes_as_a_storage() -> None:
    """As a loader's worker hands it over: the program holds it as a constant."""
    batch = torch.rand(8, 12)

    def factory() -> Training:
        model = nn.Linear(12, 4)
        optimizer = optim.Adam(model.parameters(), foreach=False)

        def iteration() -> None:
            x = torch.empty(0).set_(batch.untyped_storage(), 0, (8, 12), (12, 1))
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, iteration)

    assert_replays(factory, real=True)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature(name: str) -> None:
    """Fake tensors suffice, the replay is exact, and real tensors, without a program, give the same graph."""
    traced = assert_replays(FEATURES[name])
    on_real = trace_training(FEATURES[name], model="m", real=True, cuda_defaults=False).graph
    if name in FAKE_SIZES_DIFFER:
        assert [op.name for op in on_real.ops] == [op.name for op in traced.graph.ops]
    else:
        assert on_real == traced.graph


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_data_dependence_goes_on_with_real_tensors(name: str) -> None:
    """An iteration that needs values is traced on real tensors, and the note names the user's line."""
    traced = assert_replays(DATA_DEPENDENT[name], falls_back=True)
    assert trace_training(DATA_DEPENDENT[name], model="m", cuda_defaults=False).graph == traced.graph
    assert re.search(r"(data_dependent|trainings)\.py:\d+ needs values", traced.notes[0])


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda weight: weight.mean().item(),
    "format": lambda weight: f"{weight.mean():.3f}",
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy().sum(),
    "unique": lambda weight: torch.unique(weight),
    "mask": lambda weight: weight[weight > 0].numel(),
    "equal": lambda weight: torch.equal(weight, weight),
}


@pytest.mark.parametrize("width", [3, 300_000])
@pytest.mark.parametrize("read", READS)
def test_a_factory_may_read_its_weights(read: str, width: int) -> None:
    """However it does, the iteration is traced on fake tensors."""

    def factory() -> Training:
        model = nn.Linear(4, width, bias=False)
        READS[read](model.weight[:1000, :1] if read == "tolist" else model.weight)
        return classify(model, optim.SGD(model.parameters(), 0.1))

    traced = trace_training(factory, model="m")
    assert not traced.real
    assert any("the model was built with real ones" in note for note in traced.notes) == (width > 3)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_foreach"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_eight_networks(name: str, optimizer: str) -> None:
    """Each network of the evaluation in small form, replayed."""
    assert_replays(partial(models.factory(name), batch_size=2, optimizer=optimizer, small=True))


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw_looped", "adamw_fused", "adagrad", "rmsprop", "muon"])
def test_the_other_optimizers_on_a_network(optimizer: str) -> None:
    """A network under the remaining optimizers."""
    assert_replays(partial(models.factory("transformer"), batch_size=2, optimizer=optimizer, small=True))


def test_an_input_that_no_name_leads_to_is_named() -> None:
    """Replaying into another training than the traced one needs names for the inputs."""
    traced = trace_training(FEATURES["running_loss"], model="m", cuda_defaults=False, program=True)
    other = FEATURES["half_precision"]()
    other.iteration()
    with pytest.raises(TraceError, match=r"input %loss_total \(iteration\.loss\.total\)"):
        replay(traced, other)


def test_the_program_is_kept_only_where_it_is_asked_for() -> None:
    """It holds a copy of every constant; who wants to replay without it is told how to trace."""
    training = FEATURES["running_loss"]()
    traced = trace_training(lambda: training, model="m", cuda_defaults=False, real=True)
    assert traced.program is None
    with pytest.raises(TraceError, match=r"^m: its program was not kept; trace it with .*program=True"):
        replay(traced, training)


def test_tracing_leaves_random_state_alone() -> None:
    """The caller's random numbers do not depend on whether it traced."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trace_training(FEATURES["attention"], model="m")
    trace_training(DATA_DEPENDENT["loss_logged"], model="m")
    assert torch.equal(before, torch.get_rng_state())
