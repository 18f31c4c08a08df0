"""The live state of a training: every tensor a resume needs, under the names that a schedule uses.

Parameters and buffers as in state_dict, optimizer state as <parameter>.<slot>. Non-persistent buffers are no state.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass

import torch

from checkflow.errors import InputError
from checkflow.training import Training

_UNSUPPORTED = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "DataParallel": "DataParallel",
    "DTensor": "DTensor",
}

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


def prefixes(kind: str, count: int) -> tuple[str, ...]:
    """("model",) for one, ("model.0", "model.1") for two."""
    return (kind,) if count == 1 else tuple(f"{kind}.{index}" for index in range(count))


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile wrapped, or the module itself."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, torch.nn.Module) else module


def parameter_names(training: Training) -> dict[int, str]:
    """id(parameter) -> its first name, "model/features.0.weight"."""
    names: dict[int, str] = {}
    for prefix, model in zip(prefixes("model", len(training.models)), training.models, strict=True):
        for name, parameter in uncompiled(model).named_parameters():
            names.setdefault(id(parameter), f"{prefix}/{name}")
    return names


def live_state(training: Training) -> list[Live]:
    """Every name of every state tensor that exists now. Raises InputError for what cannot be checkpointed, by name."""
    found: list[Live] = []
    for prefix, model in zip(prefixes("model", len(training.models)), training.models, strict=True):
        for path, module in uncompiled(model).named_modules(remove_duplicate=False):
            start = f"{prefix}/{path}." if path else f"{prefix}/"
            for held, skip, buffer in (
                (module._parameters, set[str](), False),
                (module._buffers, module._non_persistent_buffers_set, True),
            ):
                found += [
                    Live(start + name, tensor, held, name, module, buffer)
                    for name, tensor in held.items()
                    if tensor is not None and name not in skip
                ]
    found += _optimizer_state(training)
    for live in found:
        _check(live)
    return found


def _optimizer_state(training: Training) -> Iterator[Live]:
    names = {identity: name.split("/", 1)[1] for identity, name in parameter_names(training).items()}
    for number, prefix in enumerate(prefixes("optimizer", len(training.optimizers))):
        optimizer = training.optimizers[number]
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    yield Live(f"{prefix}/param_groups.{index}.{key}", value, group, key, optimizer=number)
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise InputError(
                        f"{prefix}: parameter {position} of group {index}, shape {tuple(parameter.shape)}, belongs to "
                        "no model that was given; attach its module too"
                    )
                start = f"{prefix}/{names[id(parameter)]}"
                for slot, tensor, container, slot_key in _slots(optimizer.state.get(parameter, {})):
                    yield Live(f"{start}.{slot}", tensor, container, slot_key, optimizer=number, parameter=parameter)


def _slots(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor, object, object]]:
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
            yield from _slots(item, name)


def is_host_scalar(live: Live) -> bool:
    """Adam's step and its like: one CPU element of an optimizer. The host's record holds it."""
    return live.optimizer is not None and live.tensor.device.type == "cpu" and live.tensor.dim() == 0


def refuse_distributed(training: Training) -> None:
    """Raises InputError for a model of several processes, by name."""
    for prefix, model in zip(prefixes("model", len(training.models)), training.models, strict=True):
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
    if memory_order(tensor) is None:
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
