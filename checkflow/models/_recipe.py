"""How the bundled models are trained: one iteration, and the losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from checkflow.errors import InputError
from checkflow.models._optimizers import make_optimizers
from checkflow.training import Training


def check_positive(**arguments: int) -> None:
    """Raises InputError for a factory argument below 1."""
    for name, value in arguments.items():
        if value < 1:
            raise InputError(f"{name}: {value} is not positive; give 1 or more")


def check_at_most(limit: int, **arguments: int) -> None:
    """Raises InputError for a factory argument above the limit."""
    for name, value in arguments.items():
        if value > limit:
            raise InputError(f"{name}: {value} is more than the model's {limit}; give {limit} or less")


def train(model: nn.Module, loss: Callable[[], Tensor], optimizer: str, head: nn.Module | None = None) -> Training:
    """Training whose iteration is forward, loss, backward, update and zero_grad.

    `optimizer` is a name of _optimizers.OPTIMIZERS; `head` is the output layer, which Muon leaves to AdamW.
    """
    optimizers = make_optimizers(optimizer, model, head)

    def iteration() -> None:
        torch.autograd.backward(loss())
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()

    return Training(model, optimizers[0] if len(optimizers) == 1 else optimizers, iteration)


def train_as_model_does(
    model: nn.Module, inputs: tuple[Tensor, ...], optimizer: str, *, small: bool, head: nn.Module | None = None
) -> Training:
    """Training with the loss of MODeL's benchmarks: cross entropy of the output with zeros, whatever its rank.

    A target of zeros makes every gradient zero. The small networks, whose state tests compare, have another target.
    """
    criterion = nn.CrossEntropyLoss()
    target_for = _ramp if small else torch.zeros_like

    def loss() -> Tensor:
        output = model(*inputs)
        result: Tensor = criterion(output, target_for(output))
        return result

    return train(model, loss, optimizer, head)


def _ramp(output: Tensor) -> Tensor:
    """A probability for each class (dimension 1), larger for each next one."""
    return torch.ones_like(output).cumsum(1).softmax(1)


def train_language_model(model: nn.Module, tokens: Tensor, optimizer: str, head: nn.Module | None = None) -> Training:
    """Training to predict each next token. `tokens` (batch, length + 1) are integers, logits (batch, length, words)."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> Tensor:
        logits: Tensor = model(inputs)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return train(model, loss, optimizer, head)
