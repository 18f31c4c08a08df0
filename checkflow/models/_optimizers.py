"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn, optim

from checkflow.errors import InputError

# adam and adamw leave the choice between the looped and the foreach form to PyTorch, which makes it by device.
_BY_NAME: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adamw_looped": partial(optim.AdamW, foreach=False),
    "adamw_foreach": partial(optim.AdamW, foreach=True),
    "adamw_fused": partial(optim.AdamW, fused=True),
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
}
OPTIMIZERS = (*_BY_NAME, "muon")


def make_optimizers(name: str, model: nn.Module, head: nn.Module | None = None) -> list[optim.Optimizer]:
    """The named optimizer over all parameters of the model; for "muon", Muon and the AdamW that takes the rest.

    Muon is for the weights of hidden layers: the 2-D parameters except embeddings and `head`, the output layer. Raises
    InputError for a name that is not in OPTIMIZERS.
    """
    parameters = list(model.parameters())
    if name in _BY_NAME:
        return [_BY_NAME[name](parameters)]
    if name != "muon":
        raise InputError(f"optimizer: {name!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    hidden = [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in excluded]
    rest = [parameter for parameter in parameters if parameter.ndim != 2 or id(parameter) in excluded]
    return [optim.Muon(hidden), optim.AdamW(rest)]
