"""The live state of a training: every tensor a resume needs, under the names that a schedule uses.

Parameters and buffers as in state_dict, optimizer state as <parameter>.<slot>. Non-persistent buffers are no state.
What a dict or an object holds that was listed as extra is not here: it is asked for when an iteration ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass

import torch

from checkflow.errors import InputError
from checkflow.extra import TENSOR, module_tensors
from checkflow.state.names import StateName, holders, stems
from checkflow.torch_internals import compiled_from, own_buffers, own_parameters
from checkflow.training import Training
from checkflow.wrapped import unsupported

_UNSUPPORTED = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "DataParallel": "DataParallel",
    "DTensor": "DTensor",
}

MAX_RECORDED_BYTES = 2**20  # of one tensor that the host's record holds

Container = MutableMapping[object, object] | MutableSequence[object]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """One name of a state tensor, and where it is held: container[key]."""

    name: str
    tensor: torch.Tensor
    container: object
    key: object
    module: torch.nn.Module | None = None  # that owns a parameter or buffer
    buffer: bool = False
    optimizer: int | None = None  # which optimizer's state
    parameter: torch.nn.Parameter | None = None  # that an optimizer's slot belongs to

    @property
    def moved(self) -> bool:
        """Whether the container now holds another tensor, or none."""
        container = self.container
        if isinstance(container, dict):
            return container.get(self.key) is not self.tensor
        if isinstance(container, (list, tuple)) and isinstance(self.key, int):
            return self.key >= len(container) or container[self.key] is not self.tensor
        return True


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile wrapped, or the module itself."""
    original = compiled_from(module)
    return original if isinstance(original, torch.nn.Module) else module


def parameter_names(training: Training) -> dict[int, str]:
    """id(parameter) -> its first name, "model/features.0.weight"."""
    names: dict[int, str] = {}
    for prefix, model in zip(holders("model", len(training.models)), training.models, strict=True):
        for name, parameter in uncompiled(model).named_parameters():
            names.setdefault(id(parameter), f"{prefix}/{name}")
    return names


def slot_stems(training: Training) -> tuple[dict[StateName, torch.nn.Parameter], ...]:
    """For each optimizer: what the names of its slots begin with, for each of its parameters that a model has."""
    names = parameter_names(training)
    found: list[dict[StateName, torch.nn.Parameter]] = []
    for holder, optimizer in zip(holders("optimizer", len(training.optimizers)), training.optimizers, strict=True):
        updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameters = {names[id(parameter)]: parameter for parameter in updated if id(parameter) in names}
        found.append({stem: parameters[name] for name, stem in stems(holder, parameters).items()})
    return tuple(found)


def modules_of(training: Training) -> dict[str, torch.nn.Module]:
    """The models, and the modules that were listed beside them, by holder."""
    models = dict(zip(holders("model", len(training.models)), training.models, strict=True))
    return models | training.listed.modules


def live_state(training: Training) -> list[Live]:
    """Every name of every state tensor that exists now. Raises InputError for what cannot be checkpointed, by name."""
    found: list[Live] = []
    for prefix, model in modules_of(training).items():
        for path, module, name, buffer in module_tensors(uncompiled(model)):
            held = own_buffers(module) if buffer else own_parameters(module)
            tensor = held[name]
            assert tensor is not None
            found.append(Live(f"{prefix}/{path}", tensor, held, name, module, buffer))
    listed = training.listed.tensors
    found += [Live(f"{holder}/{TENSOR}", tensor, listed, holder) for holder, tensor in listed.items()]
    found += _optimizer_state(training)
    for live in found:
        _check(live)
    if len({live.name for live in found}) < len(found):
        name, _ = Counter(live.name for live in found).most_common(1)[0]
        raise InputError(f"{name}: two tensors of this training have that name; rename one")
    return found


def _optimizer_state(training: Training) -> Iterator[Live]:
    by_stem = slot_stems(training)
    for number, prefix in enumerate(holders("optimizer", len(training.optimizers))):
        optimizer = training.optimizers[number]
        stem = {id(parameter): name for name, parameter in by_stem[number].items()}
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    yield Live(f"{prefix}/param_groups.{index}.{key}", value, group, key, optimizer=number)
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in stem:
                    raise InputError(
                        f"{prefix}: parameter {position} of group {index}, shape {tuple(parameter.shape)}, belongs to "
                        "no model that was given; attach its module too"
                    )
                for slot, tensor, container, slot_key in slots(optimizer.state.get(parameter, {})):
                    name = f"{stem[id(parameter)]}.{slot}"
                    yield Live(name, tensor, container, slot_key, optimizer=number, parameter=parameter)


def slots(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor, object, object]]:
    """A parameter's optimizer state: each tensor with its slot's name, and where it is held: container[key]."""
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    for key, item in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(item, torch.Tensor):
            yield name, item, value, key
        else:
            yield from slots(item, name)


def is_host_scalar(live: Live) -> bool:
    """Adam's step and its like: one CPU element of an optimizer. The host's record holds it."""
    return live.optimizer is not None and live.tensor.device.type == "cpu" and live.tensor.dim() == 0


def check_supported(training: Training) -> None:
    """Raises InputError for what is no model or optimizer, or none that can be checkpointed, by name."""
    if not isinstance(training.model, (torch.nn.Module, Collection)):
        raise InputError(f"model: is {type(training.model).__name__}; give an nn.Module or a list of them")
    if not isinstance(training.optimizer, (torch.optim.Optimizer, Collection)):
        raise InputError(f"optimizer: {unsupported(training.optimizer)}")
    for prefix, model in zip(holders("model", len(training.models)), training.models, strict=True):
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"{prefix}: is {type(model).__name__}; give an nn.Module or a list of them")
    for prefix, optimizer in zip(holders("optimizer", len(training.optimizers)), training.optimizers, strict=True):
        reason = unsupported(optimizer)
        if reason is not None:
            raise InputError(f"{prefix}: {reason}")
    _refuse_distributed(training)


def _refuse_distributed(training: Training) -> None:
    for prefix, model in modules_of(training).items():
        for part in (*model.modules(), *model.parameters()):
            for base in type(part).__mro__:
                if base.__name__ in _UNSUPPORTED:
                    raise InputError(
                        f"{prefix}: {_UNSUPPORTED[base.__name__]} is not supported yet; attach the plain module of one "
                        "process"
                    )


def _check(live: Live) -> None:
    tensor = live.tensor
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InputError(f"{live.name}: layout {tensor.layout} is not supported; keep it as a dense tensor")
    if tensor.device.type == "meta":
        raise InputError(f"{live.name}: has no data yet (meta device); materialize it before attach")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InputError(f"{live.name}: device {tensor.device} is not supported; use cuda or cpu")
    if tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{live.name}: is a lazy conjugate or negative; store its resolve_conj().resolve_neg()")
    if live.optimizer is None and memory_order(tensor) is None:
        raise InputError(
            f"{live.name}: shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())} overlaps or has holes; "
            "make it contiguous"
        )


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its dimensions as they lie in memory, outermost first; None unless its elements lie densely, each once."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    dims = list(range(len(shape)))
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tuple(dims)
    dims.sort(key=lambda dim: (shape[dim] == 1, -strides[dim]))
    expected = 1
    for dim in reversed(dims):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return None
            expected *= shape[dim]
    return tuple(dims)
