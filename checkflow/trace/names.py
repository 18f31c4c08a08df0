"""Names of state: parameters and buffers as in state_dict, optimizer state as <parameter>.<slot>.

A non-persistent buffer is no state: a resume builds it again. A parameter that an optimizer updates has to belong to
one of the models; otherwise no checkpoint of the models would hold it, so that is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from checkflow.errors import InputError, ModelFileError, TraceError
from checkflow.extra import TENSOR, Holder, module_tensors, tensors_of
from checkflow.graph import Role
from checkflow.state.names import holders, stems
from checkflow.torch_internals import own_buffers, own_parameters
from checkflow.training import Training
from checkflow.wrapped import unsupported

_DISTRIBUTED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor", "DataParallel"}


@dataclass(frozen=True, slots=True)
class State:
    """One name of a state tensor."""

    name: str
    role: Role
    tensor: torch.Tensor
    host: bool  # on the host, whatever the device: never crosses the link
    may_change: bool = False  # in shape, or not be there: a dict of the user's holds it


def check_training(value: object, model: str) -> Training:
    """The factory's result. Raises ModelFileError unless it is a Training of plain modules and optimizers."""
    if not isinstance(value, Training):
        raise ModelFileError(
            f"{model}: the factory returned {type(value).__name__}; "
            "return checkflow.Training(model, optimizer, iteration)"
        )
    for field, given, kind in (
        ("model", value.model, torch.nn.Module),
        ("optimizer", value.optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(given, (kind, Collection)):
            reason = unsupported(given) if kind is torch.optim.Optimizer else None
            raise ModelFileError(
                f"{model}: {reason or f'{field} is {type(given).__name__}; give one, or a list of them'}"
            )
    for module in value.models:
        if not isinstance(module, torch.nn.Module):
            raise ModelFileError(f"{model}: model is {type(module).__name__}; give an nn.Module or a list of them")
        parts = [*module.modules(), *module.parameters()]
        named = {base.__name__ for part in parts for base in type(part).__mro__} & _DISTRIBUTED
        if named:
            raise TraceError(f"{model}: {min(named)} is not supported yet; trace the plain module of one process")
    for optimizer in value.optimizers:
        reason = unsupported(optimizer)
        if reason is not None:
            raise ModelFileError(f"{model}: {reason}")
    if not value.models or not value.optimizers:
        raise ModelFileError(f"{model}: the factory returned no {'optimizer' if value.models else 'model'}; give one")
    if not callable(value.iteration):
        kind = type(value.iteration).__name__
        raise ModelFileError(f"{model}: iteration is {kind}; give a function without arguments")
    try:
        value.listed  # noqa: B018 (refuses what cannot be taken)
    except InputError as error:
        raise ModelFileError(f"{model}: {error}") from None
    return value


def parameters_of(training: Training) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """("model/features.0.weight", parameter) for each parameter once, under its first name."""
    seen: set[int] = set()
    for prefix, module in zip(holders("model", len(training.models)), training.models, strict=True):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}/{name}", parameter


def state_of(training: Training, model: str) -> tuple[State, ...]:
    """Every name of every state tensor. Raises TraceError for an optimizer's parameter that belongs to no model."""
    found: list[State] = []
    for prefix, module in zip(holders("model", len(training.models)), training.models, strict=True):
        for path, part, name, buffer in module_tensors(module):
            tensor = own_buffers(part)[name] if buffer else own_parameters(part)[name]
            assert tensor is not None
            found.append(State(f"{prefix}/{path}", Role.BUFFER if buffer else Role.PARAMETER, tensor, host=False))
    return (*found, *_optimizer_state(training, model), *_extra_state(training))


def _extra_state(training: Training) -> Iterator[State]:
    """What no optimizer updates, whatever the user calls it, has the role of a buffer.

    Of the objects only dicts are known here: what state_dict() gives may be copies.
    """
    listed = training.listed
    for holder, module in listed.modules.items():
        for path, part, name, buffer in module_tensors(module):
            tensor = own_buffers(part)[name] if buffer else own_parameters(part)[name]
            assert tensor is not None
            yield State(f"{holder}/{path}", Role.BUFFER, tensor, host=False)
    for holder, tensor in listed.tensors.items():
        yield State(f"{holder}/{TENSOR}", Role.BUFFER, tensor, host=False)
    for holder, member in listed.objects.items():
        if isinstance(member, Holder):
            for path, tensor in tensors_of(member).items():
                yield State(f"{holder}/{path}", Role.BUFFER, tensor, host=False, may_change=True)


def _optimizer_state(training: Training, model: str) -> Iterator[State]:
    names = {id(parameter): name for name, parameter in parameters_of(training)}
    for prefix, optimizer in zip(holders("optimizer", len(training.optimizers)), training.optimizers, strict=True):
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stem = stems(prefix, (names[id(parameter)] for parameter in updated if id(parameter) in names))
        for index, group in enumerate(optimizer.param_groups):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    name = f"{prefix}/param_groups.{index}.{key}"
                    yield State(name, Role.OPTIMIZER, value, _is_host_scalar(value, on_device))
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise TraceError(
                        f"{model}: {prefix} updates parameter {position} of group {index}, shape "
                        f"{tuple(parameter.shape)}, which belongs to no model; list its module in Training.model"
                    )
                for slot, tensor in _slots(optimizer.state.get(parameter, {})):
                    name = f"{stem[names[id(parameter)]]}.{slot}"
                    yield State(name, Role.OPTIMIZER, tensor, _is_host_scalar(tensor, on_device))


def _is_host_scalar(tensor: torch.Tensor, on_device: bool) -> bool:
    """Adam's step and its like: on the CPU on any machine, unless the optimizer is capturable or fused."""
    return tensor.device.type == "cpu" and tensor.dim() == 0 and not on_device


def _slots(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _slots(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from _slots(item, f"{path}.{key}" if path else str(key))
