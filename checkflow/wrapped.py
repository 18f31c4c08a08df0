"""What wrappers hold: the models and optimizers whose state a checkpoint has to carry.

An optimizer that holds others (Lookahead, SAM) is several: theirs and its own state. One that passes their state on as
its own (Accelerate's, Fabric's) is only those. ZeroRedundancyOptimizer is one: its groups are its own, with all
parameters, and the state is that of the optimizer that it holds for this rank's part of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch

from checkflow.torch_internals import runs_step_hooks, takes_state_hooks

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_ASK_RANKS = {"_FabricOptimizer"}  # whose state_dict() may gather it from all ranks, and adds nothing
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
    if is_zero(optimizer):
        yield optimizer
        return
    held = [found for found in held_by(optimizer) if id(found) not in seen]
    for inner in held:
        yield from _optimizers_in(inner, seen)
    state = getattr(optimizer, "state", None)
    if not any(state is getattr(inner, "state", None) for inner in held):
        yield optimizer


def added_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.optim.Optimizer, tuple[str, ...]]]:
    """What an optimizer's own code adds in its state_dict() to state and param_groups, or to those of the optimizers
    whose state it passes on, as PostLocalSGDOptimizer does: no checkpoint has what these keys have."""
    held = [] if is_zero(optimizer) else held_by(optimizer)
    for inner in held:
        yield from added_by(inner)
    asks_ranks = any(map(is_zero, held)) or any(base.__name__ in _ASK_RANKS for base in type(optimizer).__mro__)
    if asks_ranks or (held and optimizer in optimizers_in(optimizer)):
        return
    try:
        with _state_dicts_of(held) as theirs:
            given = optimizer.state_dict()
        of_held = [key for key, value in given.items() if any(value is each for each in theirs)]
        keys = given.keys() - {"state", "param_groups"}.union(of_held, *(inner.state_dict() for inner in held))
    except Exception:  # noqa: BLE001 (the user's own; it only gives a hint)
        return
    if keys:
        yield optimizer, tuple(sorted(map(str, keys)))


@contextmanager
def _state_dicts_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[list[object]]:
    """What they give meanwhile: what is only equal to that may be an older copy, which no checkpoint has."""
    given: list[object] = []
    with ExitStack() as hooks:
        for optimizer in optimizers:
            if takes_state_hooks(optimizer):
                hooks.callback(optimizer.register_state_dict_post_hook(lambda _, found: given.append(found)).remove)
        yield given


def takes_back(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code of its own takes what its state_dict() gives."""
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def held_by(optimizer: object) -> list[torch.optim.Optimizer]:
    """The optimizers among its attributes, and in lists there."""
    values = list(getattr(optimizer, "__dict__", {}).values())
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return [value for value in values if isinstance(value, torch.optim.Optimizer)]


def is_hookable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step() runs hooks. A wrapper that never ran Optimizer.__init__ does not."""
    return runs_step_hooks(optimizer)


def is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Whether it updates this rank's part of its parameters, and receives the others from the ranks that do."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # nobody imported it: there is none
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def updater(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the update and keeps its state: of ZeroRedundancyOptimizer the one that it holds."""
    return optimizer.optim if is_zero(optimizer) else optimizer


def updated_here(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters that this rank updates and keeps state of."""
    return [parameter for group in updater(optimizer).param_groups for parameter in group["params"]]


def received(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters that its step() writes with what another rank made of them."""
    if not is_zero(optimizer):
        return []
    own = set(map(id, updated_here(optimizer)))
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    sends_frozen = not optimizer.parameters_as_bucket_view  # a bucket has none of them
    return [each for each in every if id(each) not in own and (each.requires_grad or sends_frozen)]


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its updates are those of a class of torch's own: of each parameter by itself."""
    kind = type(updater(optimizer))
    return getattr(torch.optim, kind.__name__, None) is kind
