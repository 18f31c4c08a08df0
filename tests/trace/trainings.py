"""Small trainings, one for each thing that a trace has to get right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from checkflow import Training

Factory = Callable[[], Training]
FEATURES: dict[str, Factory] = {}


def feature(factory: Factory) -> Factory:
    """Register a training that can be traced on fake tensors."""
    FEATURES[factory.__name__] = factory
    return factory


def mlp(dropout: float = 0.3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randint(0, 3, (8,))


Optimizers = optim.Optimizer | list[optim.Optimizer]


def loop(model: nn.Module, optimizers: Optimizers, loss: Callable[[], Tensor]) -> Training:
    """Forward, backward, update, zero_grad."""
    group = [optimizers] if isinstance(optimizers, optim.Optimizer) else optimizers

    def iteration() -> None:
        torch.autograd.backward(loss())
        for optimizer in group:
            optimizer.step()
        for optimizer in group:
            optimizer.zero_grad()

    return Training(model, group, iteration)


def classify(model: nn.Module, optimizers: Optimizers) -> Training:
    x, y = batch()
    return loop(model, optimizers, lambda: F.cross_entropy(model(x), y))


@feature
def gan() -> Training:
    generator = nn.Linear(3, 4)
    critic = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    first, second = optim.Adam(generator.parameters(), foreach=True), optim.Adam(critic.parameters(), foreach=False)
    x, score = torch.randn(6, 4), F.binary_cross_entropy_with_logits

    def iteration() -> None:
        second.zero_grad()
        made = generator(torch.randn(6, 3))
        loss = score(critic(x), torch.ones(6, 1)) + score(critic(made.detach()), torch.zeros(6, 1))
        torch.autograd.backward(loss)
        second.step()
        first.zero_grad()
        torch.autograd.backward(score(critic(made), torch.ones(6, 1)))
        first.step()

    return Training([generator, critic], [first, second], iteration)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(words))
        return logits


@feature
def tied_weights() -> Training:
    model, words = TiedModel(), torch.randint(0, 7, (9,))
    return loop(model, optim.AdamW(model.parameters(), foreach=True), lambda: F.cross_entropy(model(words), words))


@feature
def frozen_and_unused() -> Training:
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(2, 2)})
    model["used"][0].weight.requires_grad_(False)  # type: ignore[index]
    (x, y), used = batch(), model["used"]
    sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return loop(model, sgd, lambda: F.cross_entropy(used(x), y))


class Buffered(nn.Module):
    mean: Tensor
    count: Tensor
    ones: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ones", torch.ones(3), persistent=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.ones * self.scale * self.log_scale.exp()
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.count += 1
        return y


@feature
def buffers_in_forward() -> Training:
    model = Buffered()
    return classify(model, optim.Adam(model.parameters(), foreach=False))


@feature
def accumulation() -> Training:
    model, (x, y) = mlp(), batch()
    adamw = optim.AdamW(model.parameters(), fused=True)

    def iteration() -> None:
        adamw.zero_grad()
        for i in range(3):
            torch.autograd.backward(F.cross_entropy(model(x + i), y) / 3)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()

    return Training(model, adamw, iteration)


@feature
def autocast() -> Training:
    model, (x, y) = mlp(), batch()

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return loop(model, optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True), loss)


def _checkpointed(*, reentrant: bool) -> Training:
    model, (x, y) = mlp(), batch()
    x.requires_grad_()

    def loss() -> Tensor:
        x.grad = None
        return F.cross_entropy(model[4](checkpoint(model[:4], x, use_reentrant=reentrant)), y)

    return loop(model, optim.Adam(model.parameters(), foreach=True), loss)


@feature
def checkpointing_reentrant() -> Training:
    return _checkpointed(reentrant=True)


@feature
def checkpointing_not_reentrant() -> Training:
    return _checkpointed(reentrant=False)


@feature
def optimizer_in_backward() -> Training:
    model, (x, y) = mlp(), batch()
    optimizers = {p: optim.Adam([p], foreach=False) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return Training(model, list(optimizers.values()), lambda: torch.autograd.backward(F.cross_entropy(model(x), y)))


def _zeroed_at_start(*, set_to_none: bool) -> Training:
    model, (x, y) = mlp(), batch()
    adagrad = optim.Adagrad(model.parameters(), foreach=True)

    def iteration() -> None:
        adagrad.zero_grad(set_to_none=set_to_none)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        adagrad.step()

    return Training(model, adagrad, iteration)


@feature
def zero_grad_at_start() -> Training:
    return _zeroed_at_start(set_to_none=True)


@feature
def zero_grad_not_to_none() -> Training:
    return _zeroed_at_start(set_to_none=False)


@feature
def scheduler_inside() -> Training:
    model, (x, y) = mlp(), batch()
    adamw = optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    scheduler = optim.lr_scheduler.StepLR(adamw, 1, 0.5)

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        adamw.step()
        adamw.zero_grad()
        scheduler.step()

    return Training(model, adamw, iteration)


@feature
def channels_last() -> Training:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(layers, nn.Linear(4, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.randint(0, 3, (4,))
    sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    return loop(model, sgd, lambda: F.cross_entropy(model(x), y))


@feature
def half_precision() -> Training:
    model, (x, y) = mlp().to(torch.bfloat16), batch()
    # Not fused: on the CPU torch 2.13's fused bfloat16 kernel gives another momentum buffer from run to run.
    sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return loop(model, sgd, lambda: F.cross_entropy(model(x.bfloat16()), y))


@feature
def moving_average() -> Training:
    model, (x, y) = mlp(), batch()
    average = copy.deepcopy(model)
    sgd = optim.SGD(model.parameters(), 0.1)

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        sgd.step()
        sgd.zero_grad()
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)

    return Training([model, average], sgd, iteration)


@feature
def own_generators() -> Training:
    model, (x, y) = mlp(), batch()
    kept = torch.Generator().manual_seed(3)

    def loss() -> Tensor:
        made = torch.Generator().manual_seed(5)
        noise = torch.randn(8, 4, generator=kept) + torch.randn(8, 4, generator=made)
        kept.manual_seed(4)
        return F.cross_entropy(model(x + noise + torch.rand(8, 4, generator=kept)), y)

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@feature
def forked_random_state() -> Training:
    model, (x, y) = mlp(), batch()

    def loss() -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            noise = torch.randn(8, 4)
        return F.cross_entropy(model(x + noise), y)

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@feature
def running_loss() -> Training:
    model, (x, y), total = mlp(), batch(), torch.zeros(())

    def loss() -> Tensor:
        value = F.cross_entropy(model(x), y)
        total.add_(value.detach())
        return value

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@feature
def constants_inside() -> Training:
    model, (x, y) = mlp(), batch()

    def loss() -> Tensor:
        shift = torch.from_numpy(np.ones((8, 4), dtype=np.float32))
        return F.cross_entropy(model(x + shift), y, weight=torch.tensor([1.0, 2.0, 3.0]))

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@feature
def recurrent() -> Training:
    parts = nn.Embedding(9, 4), nn.LSTM(4, 5, 2, dropout=0.2, batch_first=True), nn.Linear(5, 9)
    model, words = nn.ModuleList(parts), torch.randint(0, 9, (3, 6))

    def loss() -> Tensor:
        return F.cross_entropy(parts[2](parts[1](parts[0](words))[0]).flatten(0, 1), words.flatten())

    return loop(model, optim.Adam(model.parameters(), foreach=True), loss)


@feature
def reparametrized() -> Training:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))
    model = nn.Sequential(normed, spectral)
    return classify(model, optim.SGD(model.parameters(), 0.1))


@feature
def attention() -> Training:
    model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), torch.randn(3, 5, 8)
    return loop(model, optim.AdamW(model.parameters(), foreach=False, amsgrad=True), lambda: model(x).pow(2).mean())


@feature
def norms() -> Training:
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True, affine=True)]
    layers += [nn.GroupNorm(2, 4), nn.RReLU(), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(64, 3)]
    model, x, y = nn.Sequential(*layers), torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4,))
    return loop(model, optim.SGD(model.parameters(), 0.1), lambda: F.cross_entropy(model(x), y))


@feature
def update_by_hand() -> Training:
    model, (x, y) = mlp(), batch()

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

    return Training(model, optim.SGD(model.parameters(), 0.1), iteration)


@feature
def learning_rate_tensor() -> Training:
    model = mlp()
    return classify(model, optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True))


@feature
def complex_parameters() -> Training:
    model, x = nn.Linear(4, 3, dtype=torch.complex64), torch.randn(5, 4, dtype=torch.complex64)
    return loop(model, optim.Adam(model.parameters(), foreach=True), lambda: model(x).abs().mean())


@feature
def loss_kept() -> Training:
    model, (x, y) = mlp(), batch()
    kept: list[Tensor] = []

    def loss() -> Tensor:
        kept[:] = [F.cross_entropy(model(x), y)]
        return kept[0]

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@feature
def masked() -> Training:
    model, (x, y) = mlp(), batch()

    def loss() -> Tensor:
        rows = (x[:, 0] > -1).nonzero().flatten()
        return F.cross_entropy(model(x)[rows], y[rows])

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@feature
def adafactor() -> Training:
    model = mlp(dropout=0.0)
    return classify(model, optim.Adafactor(model.parameters()))


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.linear = rate, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), self.rate, self.training) if self.rate else self.linear(x)


@feature
def rates_read_by_the_factory() -> Training:
    rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
    index = torch.arange(4).flip(0)
    model = nn.Sequential(*(DropPath(rate) for rate in rates), nn.Linear(4, int(index.max()) + index.tolist()[-1]))
    return classify(model, optim.SGD(model.parameters(), 0.1, momentum=0.9))


@feature
def weights_read_by_the_factory() -> Training:
    wide = nn.Linear(4, 70_000)
    nn.init.trunc_normal_(wide.weight, std=0.02)
    with torch.no_grad():
        if wide.weight.norm() > 1:  # known only where all that the factory makes is
            wide.weight.div_(wide.weight.norm().item())
    model = nn.Sequential(wide, nn.ReLU(), nn.Linear(70_000, 3))
    return classify(model, optim.SGD(model.parameters(), 0.1, momentum=0.9))
