"""What earlier runs have learned: a schedule and its graph, beside the checkpoints, under what it depends on."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch

from checkflow.errors import FormatError, InputError
from checkflow.extra import module_tensors
from checkflow.jsonfile import digest_of
from checkflow.learning.messages import DEFAULT_POLICY
from checkflow.schedule import Schedule, read_schedule
from checkflow.state.holders import modules_of, optimizers_of, unwrapped
from checkflow.state.live import parameters_of
from checkflow.state.shards import is_shared, local
from checkflow.torch_internals import own_buffers, own_parameters
from checkflow.training import Training
from checkflow.wrapped import is_zero, updated_here, updater

FOLDER = "learned"


def place_of(store: Path, training: Training, interval: int | None, policy: str) -> Path:
    """Where the schedule of such a training is kept: store/learned/1f0c..., with endings.

    What the iteration does is not known when it is asked for; whoever uses the schedule checks it as training goes.
    """
    content: dict[str, object] = {
        "modules": {
            holder: [
                (path, str(tensor.dtype), list(tensor.shape), tensor.requires_grad, *_shape_here(tensor))
                for path, module, name, buffer in module_tensors(unwrapped(whole))
                for tensor in [(own_buffers if buffer else own_parameters)(module)[name]]
                if tensor is not None
            ]
            for holder, whole in modules_of(training).items()
        },
        "optimizers": {
            holder: [
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
                [_settings(group) for group in optimizer.param_groups],
                *_part(optimizer),
            ]
            for holder, optimizer in optimizers_of(training).items()
        },
        "tensors": {holder: list(tensor.shape) for holder, tensor in training.listed.tensors.items()},
        "interval": interval,
        "device": _device(training),
        "versions": [torch.__version__, platform.python_version()],
    }
    if policy != DEFAULT_POLICY:  # so that what was learned when there was no other keeps its place
        content["policy"] = policy
    if training.division is not None:  # whose share it is, of what ranks have alike
        content["division"] = asdict(training.division) | {"entries": "by name"}  # not by storage, as they once were
    return store.absolute() / FOLDER / digest_of(content).removeprefix("sha256:")[:16]


def kept_schedule(place: Path, notify: Callable[[str], None]) -> Schedule | None:
    """What an earlier run has learned; None where there is nothing, or what cannot be read, which `notify` is told."""
    path = place.with_suffix(".schedule.json")
    if place.parent.is_symlink() or path.is_symlink() or not path.is_file():
        return None
    try:
        return read_schedule(path)
    except (FormatError, InputError) as error:
        notify(f"{error}; learning anew")
        return None


def _shape_here(tensor: torch.Tensor) -> list[list[int]]:
    """Of what ranks share: what this one has."""
    return [list(local(tensor).shape)] if is_shared(tensor) else []


def _part(optimizer: torch.optim.Optimizer) -> list[object]:
    """Of ZeroRedundancyOptimizer: which optimizer this rank has, of what."""
    if not is_zero(optimizer):
        return []
    kind = type(updater(optimizer))
    return [f"{kind.__module__}.{kind.__qualname__}", [list(each.shape) for each in updated_here(optimizer)]]


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    """What its state and its functions depend on: how many parameters, and which settings are on, not their values."""
    numbers: dict[str, object] = {
        key: bool(value) for key, value in group.items() if isinstance(value, (bool, int, float, type(None)))
    }
    return numbers | {"parameters": len(cast(Sized, group["params"]))}


def _device(training: Training) -> str:
    devices = {parameter.device for _, parameter in parameters_of(training) if parameter.device.type == "cuda"}
    return torch.cuda.get_device_name(min(devices, key=str)) if devices else f"cpu, {torch.get_num_threads()} threads"
