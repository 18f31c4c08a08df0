"""What the checkpoints of this process's trainings hold, and what the objects have that they ask: it is not forgotten.

An object that is listed counts with what it gives when it is asked, or where that are copies, with what it has that is
like them. What is attached otherwise, a scheduler or a loader, counts with all that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from checkflow.extra import Stateful, Variables
from checkflow.state.attached import attached_here
from checkflow.state.holders import extra_state_of, models_of, modules_of
from checkflow.state.live import asked_state
from checkflow.state.memory import has_storage
from checkflow.state.own import state_of
from checkflow.state.shards import local
from checkflow.torch_internals import storage_id
from checkflow.trace.reachable import objects_in
from checkflow.training import Training

Roots = list[tuple[str, object]]


def storages_held(training: Training, *, own: bool) -> frozenset[int]:
    """Identities of storages: of objects that are asked, of what optimizers' state and groups have in containers of any
    kind, and of what other trainings have; with `own`, also of this one's models, optimizers and listed modules and
    tensors."""
    others = [one.training for one in attached_here() if one.training is not training]
    listed = [one.listed.objects for one in (training, *others)]
    found = [tensor for objects in listed for tensor in _given_by(objects)]
    found += _tensors_in(_beside()) + _in_optimizers(training)
    for one in (training, *others) if own else others:
        found += _tensors_of(one)
    return frozenset(storage_id(each.untyped_storage()) for each in map(local, found) if has_storage(each))


def objects_held(training: Training, kinds: tuple[type, ...]) -> list[object]:
    """What the objects of these kinds are that objects have which are asked, or that are attached themselves."""
    trainings = (training, *(one.training for one in attached_here()))
    models = [model for one in trainings for model in models_of(one).values()]
    own_state: Roots = [found for model in models for found in extra_state_of(model).items()]
    listed = [_named_in(found) for one in trainings for found in one.listed.objects.items()]
    return objects_in(listed + _beside() + own_state, kinds)


def _beside() -> Roots:
    """What is attached beside what trainings list."""
    trainings = [(one.beside, one.training.listed.objects) for one in attached_here()]
    return [found for beside, listed in trainings for found in beside.items() if found[0] not in listed]


def _named_in(found: tuple[str, object]) -> tuple[str, object]:
    """Of a namespace those variables alone that are named."""
    name, member = found
    return name, member.state_dict() if isinstance(member, Variables) else member


def _given_by(objects: Mapping[str, Stateful]) -> Iterator[torch.Tensor]:
    for name, member in objects.items():
        given = [tensor for _, tensor in asked_state({name: member}) if has_storage(tensor)]
        yield from given
        direct = {storage_id(tensor.untyped_storage()) for tensor in given}  # which are no copies of what it has
        own = [each for each in _tensors_in([_named_in((name, member))]) if has_storage(each)]
        kept = {storage_id(tensor.untyped_storage()) for tensor in own}
        copies = Counter(_like(tensor) for tensor in given if storage_id(tensor.untyped_storage()) not in kept)
        for tensor in own:
            if storage_id(tensor.untyped_storage()) not in direct and copies[_like(tensor)]:
                copies[_like(tensor)] -= 1
                yield tensor


def _like(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _tensors_of(training: Training) -> list[torch.Tensor]:
    found: list[torch.Tensor] = list(training.listed.tensors.values())
    for module in modules_of(training).values():
        found += _with_gradients([*module.parameters(), *module.buffers()])
    return found + _in_optimizers(training)


def _in_optimizers(training: Training) -> list[torch.Tensor]:
    """All of it is saved, in files or in the record, or refused."""
    roots: Roots = [("optimizer", dict(state_of(each))) for each in training.optimizers]
    for group in (group for each in training.optimizers for group in each.param_groups):
        roots += [item for item in group.items() if item[0] != "params"]
    return _tensors_in(roots)


def _with_gradients(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _tensors_in(roots: Roots) -> list[torch.Tensor]:
    return [value for value in objects_in(roots, (torch.Tensor,)) if isinstance(value, torch.Tensor)]
