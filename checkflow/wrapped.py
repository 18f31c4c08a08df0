"""What wrappers hold: the models and optimizers whose state a checkpoint has to carry.

An optimizer that holds others (Lookahead, SAM) is several: theirs and its own state. One that passes their state on as
its own (Accelerate's, Fabric's) is only those.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checkflow.torch_internals import runs_step_hooks

_MODULES = {"_FabricModule": "_forward_module"}  # class -> where the wrapped module is


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module that a known wrapper calls, or the module itself."""
    for base in type(module).__mro__:
        inner = getattr(module, _MODULES[base.__name__], None) if base.__name__ in _MODULES else None
        if isinstance(inner, torch.nn.Module):
            return unwrapped(inner)
    return module


def optimizers_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one holds, then itself if it has state of its own."""
    return tuple(dict.fromkeys(_optimizers_in(optimizer, set())))


def _optimizers_in(optimizer: torch.optim.Optimizer, seen: set[int]) -> Iterator[torch.optim.Optimizer]:
    seen.add(id(optimizer))
    held = [found for found in held_by(optimizer) if id(found) not in seen]
    for inner in held:
        yield from _optimizers_in(inner, seen)
    state = getattr(optimizer, "state", None)
    if not any(state is getattr(inner, "state", None) for inner in held):
        yield optimizer


def held_by(optimizer: object) -> list[torch.optim.Optimizer]:
    """The optimizers among its attributes, and in lists there."""
    values = list(getattr(optimizer, "__dict__", {}).values())
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return [value for value in values if isinstance(value, torch.optim.Optimizer)]


def is_hookable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step() runs hooks. A wrapper that never ran Optimizer.__init__ does not."""
    return runs_step_hooks(optimizer)
