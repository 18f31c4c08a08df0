"""The models and optimizers of a training, by the names of what holds state: "model", or "model.1" of several."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checkflow.state.names import holders, in_state_dict
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


def parts_of(module: torch.nn.Module, *, each_path: bool = False) -> Iterator[tuple[str, torch.nn.Module]]:
    """Its modules under the paths of its state_dict, a wrapper before what it wraps under the same one.

    `each_path`: of a module that stands in several places all paths.
    """
    for path, part in module.named_modules(remove_duplicate=not each_path):
        yield in_state_dict(path), part


def extra_state_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Its modules that have more to save than tensors, by path."""
    return {
        path: module
        for path, module in parts_of(unwrapped(model))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }
