"""Tensors in the state of attached objects: to files of the checkpoint where slots have room for them, else the record.

A room is laid out at attach, for a tensor as it is then or as the schedule knows it. What is of another shape in some
iteration, or was not there yet, goes to the record, so that a batch fetched ahead may have any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from checkflow.errors import InputError
from checkflow.extra import Stateful, with_leaves
from checkflow.state import refused
from checkflow.state.host.json_values import MAX_TENSOR_BYTES, Recorded, Stored
from checkflow.state.live import asked_state
from checkflow.state.memory import unusual_order
from checkflow.state.names import StateName
from checkflow.units import format_bytes

MAX_LATE_BYTES = 16 * 2**20  # of one tensor that has no room in a file, for it was not there at attach

Room = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Split:
    """An object's state without its tensors, and these by the names of their rooms.

    `on_device`, `leaves`: paths of tensors, in files or not, that lie on the device, and that require a gradient.
    """

    state: object
    tensors: Mapping[StateName, torch.Tensor]
    on_device: tuple[str, ...]
    leaves: tuple[str, ...]


def in_files(objects: Mapping[str, Stateful]) -> dict[StateName, torch.Tensor]:
    """Those that want a room, by state name: all that was listed as extra; of others what is large or on a device."""
    found: dict[StateName, torch.Tensor] = {}
    scalers = {holder for holder, member in objects.items() if isinstance(member, torch.amp.GradScaler)}
    asked = {holder: member for holder, member in objects.items() if holder not in scalers}  # for those it has to wait
    for name, tensor in asked_state(asked):
        if name.is_extra or _bytes(tensor) > MAX_TENSOR_BYTES or tensor.device.type != "cpu":
            refused.check_stored(name, tensor)
            if tensor.numel():
                found[name] = tensor
    return found


def split(holder: str, state: object, rooms: Mapping[StateName, Room]) -> Split:
    """Raises InputError that names a tensor that cannot be saved."""
    tensors: dict[StateName, torch.Tensor] = {}
    on_device: list[str] = []
    leaves: list[str] = []

    def taken(path: str, value: object) -> object:
        assert isinstance(value, torch.Tensor)
        name = StateName.of(holder, path)
        has_room = rooms.get(name) == (value.dtype, tuple(value.shape))
        if not (has_room or name.is_extra):
            return value
        refused.check_stored(name, value)
        if value.device.type != "cpu":
            on_device.append(path)
        if value.requires_grad and value.is_leaf:
            leaves.append(path)
        if has_room:
            tensors[name] = value.detach()
            return Stored(path, unusual_order(value))
        if _bytes(value) > MAX_LATE_BYTES:
            raise InputError(
                f"{name}: {format_bytes(_bytes(value))}, which was not there at attach, or not of shape "
                f"{tuple(value.shape)}, so no file has room for it; fill it before attach, or list it in "
                "Training(extra=...) and compile"
            )
        return Recorded(value.detach().cpu().resolve_conj().resolve_neg())

    changed = with_leaves(state, (torch.Tensor,), taken)
    return Split(changed, tensors, tuple(on_device), tuple(leaves))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
