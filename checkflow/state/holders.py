"""The models and optimizers of a training, by the names of what holds state: "model", or "model.1" of several."""

from __future__ import annotations

import torch

from checkflow.state.names import holders
from checkflow.torch_internals import compiled_from
from checkflow.training import Training


def models_of(training: Training) -> dict[str, torch.nn.Module]:
    """As they were given, wrapped or not."""
    return dict(zip(holders("model", len(training.models)), training.models, strict=True))


def modules_of(training: Training) -> dict[str, torch.nn.Module]:
    """The models, and the modules that were listed beside them."""
    return models_of(training) | training.listed.modules


def optimizers_of(training: Training) -> dict[str, torch.optim.Optimizer]:
    return dict(zip(holders("optimizer", len(training.optimizers)), training.optimizers, strict=True))


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile or DistributedDataParallel wrapped, or the module itself."""
    wraps = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    original = module.module if wraps else compiled_from(module)
    return unwrapped(original) if isinstance(original, torch.nn.Module) else module


def extra_state_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Its modules that have more to save than tensors, by path."""
    return {
        path: module
        for path, module in unwrapped(model).named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }
