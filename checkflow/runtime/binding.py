"""The schedule's state rows matched with the live tensors. Addresses change, so this is done anew when one did.

Optimizer state that does not exist yet is absent, not wrong: optimizers create it in their first update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from checkflow.errors import InputError
from checkflow.runtime.device import Event
from checkflow.runtime.state import Live, is_host_scalar, live_state, memory_order, parameter_names
from checkflow.schedule import Schedule, ViewRow
from checkflow.training import Training


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint's files. `order`: its dimensions as they lie in memory; `alias_of`: it is tied."""

    name: str
    dtype: str  # "float32"
    shape: tuple[int, ...]
    order: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a storage that are a target's."""

    start_bytes: int
    size_bytes: int
    target: str


@dataclass(slots=True, eq=False)
class Storage:
    """A state storage, bound."""

    id: int  # StateRow.id; -1 for what the schedule does not have
    name: str
    written: bool  # by the traced iteration
    data: torch.Tensor  # all its bytes, uint8; keeps the storage alive wherever the training moves on
    address: int
    lives: tuple[Live, ...]
    segments: tuple[Segment, ...]
    counted: tuple[torch.Tensor, ...] = ()  # those of `lives` that count their writes: all but inference tensors
    epoch: int = 0  # guarded writes so far
    reading: Event | None = None  # the latest offload that reads it live

    def version(self) -> tuple[int, ...]:
        """Changes when the content does, as far as PyTorch and the guards can tell."""
        return (self.address, self.epoch, *[tensor._version for tensor in self.counted])


@dataclass(frozen=True, slots=True)
class Binding:
    """What is bound now. `hosted`: state in host memory beside a CUDA training, copied when the iteration ends."""

    device: torch.device
    storages: dict[int, Storage]  # by StateRow.id
    hosted: tuple[Storage, ...]
    absent: frozenset[str]  # optimizer state that does not exist yet
    targets: dict[str, Target]
    optimizer_storages: tuple[tuple[Storage, ...], ...]
    buffer_storages: dict[torch.nn.Module, tuple[Storage, ...]]
    module_storages: dict[torch.nn.Module, tuple[Storage, ...]]  # parameters and buffers
    sizes: tuple[int, ...]  # of the optimizers
    _tensors: list[tuple[Live, int]] = field(repr=False)

    def stale(self, training: Training) -> bool:
        """Whether a tensor moved, or appeared: bind again."""
        if any(live.moved or live.tensor.data_ptr() != pointer for live, pointer in self._tensors):
            return True
        return _sizes(training) != self.sizes


def _sizes(training: Training) -> tuple[int, ...]:
    """For each optimizer, how many parameters it has and how many slots of state."""
    sizes: list[int] = []
    for optimizer in training.optimizers:
        sizes.append(sum(len(group["params"]) for group in optimizer.param_groups))
        sizes.append(sum(len(slots) for slots in optimizer.state.values()))
    return tuple(sizes)


def bind(schedule: Schedule, training: Training, fixed: Binding | None = None) -> Binding:
    """Match rows and tensors. With `fixed`, the targets stay as they were bound first.

    Raises InputError that names the first difference between the schedule and the training.
    """
    lives = {live.name: live for live in live_state(training)}
    device = _device_of(lives)
    parameters = {name.split("/", 1)[1]: live for name, live in lives.items() if live.module is not None}
    targets = dict(fixed.targets) if fixed is not None else {}
    known = {} if fixed is None else {storage.name: storage for storage in (*fixed.storages.values(), *fixed.hosted)}
    storages: dict[int, Storage] = {}
    hosted: list[Storage] = []
    absent: list[str] = []
    for row in schedule.state:
        if all(view.name not in lives for view in row.views) and all(_may_be_absent(v, lives) for v in row.views):
            absent += [view.name for view in row.views]
            for view in row.views:
                targets.setdefault(view.name, Target(view.name, view.dtype, view.shape, _expected(view, parameters)))
            continue
        storage = _bound(row.id, row.written, [_checked(view, lives) for view in row.views], targets, fixed is None)
        if row.bytes != storage.data.numel():
            raise InputError(
                f"{storage.name}: its storage has {storage.data.numel()} bytes, {row.bytes} in the schedule; {_ADVICE}"
            )
        if device.type == "cuda" and storage.data.device.type == "cpu":
            hosted.append(storage)
        else:
            storages[row.id] = storage
    scheduled = {view.name for row in schedule.state for view in row.views}
    for live in lives.values():
        if live.name not in scheduled and not is_host_scalar(live):
            _check_unscheduled(live, device)
            hosted.append(_bound(-1, False, [live], targets, fixed is None))
    storages = {id_: _same(storage, known.get(storage.name)) for id_, storage in storages.items()}
    by_tensor = {id(live.tensor): storage for storage in storages.values() for live in storage.lives}
    return Binding(
        device=device,
        storages=storages,
        hosted=tuple(hosted),
        absent=frozenset(absent),
        targets=targets,
        optimizer_storages=tuple(
            _of_optimizer(number, optimizer, lives.values(), by_tensor)
            for number, optimizer in enumerate(training.optimizers)
        ),
        buffer_storages=_of_modules((live for live in lives.values() if live.buffer), by_tensor),
        module_storages=_of_modules(lives.values(), by_tensor),
        sizes=_sizes(training),
        _tensors=[(live, live.tensor.data_ptr()) for live in lives.values() if not is_host_scalar(live)],
    )


found = TypeVar("found")

_ADVICE = "attach what the schedule was compiled for, or compile it again"


def check_updated(binding: Binding, training: Training, number: int) -> None:
    """After optimizer `number` made an update: raises InputError if state that its parameters should have is absent."""
    if not binding.absent:
        return
    names = {name.split("/", 1)[1]: identity for identity, name in parameter_names(training).items()}
    updated = {
        id(parameter)
        for group in training.optimizers[number].param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    for name in sorted(binding.absent):
        owner = _owner(name, names)
        if owner in updated:
            raise InputError(f"{name}: in the schedule, but this optimizer has no such state; {_ADVICE}")


def _owner(name: str, parameters: dict[str, found]) -> found | None:
    """The parameter that "optimizer/<parameter>.<slot>" belongs to."""
    path = name.split("/", 1)[1]
    while "." in path:
        path = path.rsplit(".", 1)[0]
        if path in parameters:
            return parameters[path]
    return None


def _may_be_absent(view: ViewRow, lives: dict[str, Live]) -> bool:
    """Optimizer state may come later, unless its parameter already has other state."""
    if not view.name.startswith("optimizer"):
        return False
    start = view.name.rsplit(".", 1)[0] + "."
    return not any(name.startswith(start) for name in lives)


def _checked(view: ViewRow, lives: dict[str, Live]) -> Live:
    live = lives.get(view.name)
    if live is None:
        raise InputError(f"{view.name}: in the schedule, but not in this training; {_ADVICE}")
    shape, dtype = tuple(live.tensor.shape), _dtype(live.tensor)
    if shape != view.shape:
        raise InputError(f"{view.name}: has shape {shape}, {view.shape} in the schedule; {_ADVICE}")
    if dtype != view.dtype:
        raise InputError(f"{view.name}: has dtype {dtype}, {view.dtype} in the schedule; {_ADVICE}")
    return live


def _bound(id_: int, written: bool, lives: Sequence[Live], targets: dict[str, Target], free: bool) -> Storage:
    first = lives[0].tensor
    whole = first.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=first.device).set_(whole, 0, (whole.nbytes(),), (1,))
    segments: list[Segment] = []
    same: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], str] = {}
    for live in lives:
        tensor = live.tensor
        if tensor.untyped_storage().data_ptr() != whole.data_ptr():
            raise InputError(
                f"{live.name}: tied to {lives[0].name} in the schedule, but not in this training; {_ADVICE}"
            )
        order = memory_order(tensor)
        assert order is not None
        start = int(tensor.storage_offset()) * tensor.element_size()
        key = live.name.split("/", 1)[0], start, tuple(tensor.shape), order
        target = Target(live.name, _dtype(tensor), tuple(tensor.shape), order, same.get(key))
        if free:
            targets[live.name] = target
            same.setdefault(key, live.name)
        fixed = targets[live.name]
        if fixed.order != order:
            raise InputError(f"{live.name}: its memory format changed since attach; set it before attach")
        if fixed.alias_of is None:
            segments.append(Segment(start, tensor.numel() * tensor.element_size(), live.name))
    counted = tuple(live.tensor for live in lives if not live.tensor.is_inference())
    return Storage(id_, lives[0].name, written, data, whole.data_ptr(), tuple(lives), tuple(segments), counted)


def _same(storage: Storage, old: Storage | None) -> Storage:
    """The storage that was bound before, where it is the same one: an offload may be reading it."""
    if old is None or old.address != storage.address:
        return storage
    old.lives, old.segments, old.counted = storage.lives, storage.segments, storage.counted
    return old


def _check_unscheduled(live: Live, device: torch.device) -> None:
    on_host = device.type == "cuda" and live.tensor.device.type == "cpu"
    if live.tensor.numel() and not (on_host and live.optimizer is None):
        raise InputError(f"{live.name}: is state of this training, but not in the schedule; {_ADVICE}")


def _expected(view: ViewRow, parameters: dict[str, Live]) -> tuple[int, ...]:
    """The memory order that optimizer state will have: its parameter's, where shapes agree."""
    owner = _owner(view.name, parameters)
    order = memory_order(owner.tensor) if owner is not None and tuple(owner.tensor.shape) == view.shape else None
    return order if order is not None else tuple(range(len(view.shape)))


def _device_of(lives: dict[str, Live]) -> torch.device:
    devices = {live.tensor.device for live in lives.values() if live.tensor.device.type == "cuda"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(f"model: its state lies on {names}; several devices in one process are not supported yet")
    return devices.pop() if devices else torch.device("cpu")


def _of_optimizer(
    number: int, optimizer: torch.optim.Optimizer, lives: Iterable[Live], by_tensor: dict[int, Storage]
) -> tuple[Storage, ...]:
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [live.tensor for live in lives if live.optimizer == number]
    found = (by_tensor.get(id(tensor)) for tensor in tensors)
    return tuple(dict.fromkeys(storage for storage in found if storage is not None))


def _of_modules(lives: Iterable[Live], by_tensor: dict[int, Storage]) -> dict[torch.nn.Module, tuple[Storage, ...]]:
    found: dict[torch.nn.Module, dict[Storage, None]] = {}
    for live in lives:
        storage = by_tensor.get(id(live.tensor))
        if live.module is not None and storage is not None:
            found.setdefault(live.module, {})[storage] = None
    return {module: tuple(storages) for module, storages in found.items()}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
