"""The schedule's state rows matched with the live tensors. Addresses change, so this is done anew when one did.

Optimizer state that does not exist yet is absent, not wrong: optimizers create it in their first update. At attach a
difference is refused; later on only what no slot has room for is, and all else is read when the iteration ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from checkflow.dtypes import name_of
from checkflow.errors import InputError
from checkflow.runtime.device import Event
from checkflow.schedule import Schedule, StateRow, ViewRow
from checkflow.state import refused
from checkflow.state.host.json_values import MAX_TENSOR_BYTES
from checkflow.state.live import Live, live_state, slot_stems
from checkflow.state.memory import memory_order
from checkflow.state.names import StateName, nearest, owner
from checkflow.torch_internals import versions
from checkflow.training import Training


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint's files. `order`: its dimensions as they lie in memory; `alias_of`: it is tied."""

    name: StateName
    dtype: str  # "float32"
    shape: tuple[int, ...]
    order: tuple[int, ...]
    alias_of: StateName | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a storage that are a target's."""

    start_bytes: int
    size_bytes: int
    target: StateName


@dataclass(slots=True, eq=False)
class BoundStorage:
    """A state storage, bound."""

    id: int  # StateRow.id; -1 for what the schedule does not have
    name: StateName
    written: bool  # by the traced iteration
    data: torch.Tensor  # all its bytes, uint8; keeps the storage alive wherever the training moves on
    address: int
    lives: tuple[Live, ...]
    segments: tuple[Segment, ...]
    counted: tuple[torch.Tensor, ...] = ()  # those of `lives` that count their writes: all but inference tensors
    epoch: int = 0  # guarded writes so far
    reading: Event | None = None  # the latest offload that reads it live
    serial: int = field(default_factory=count().__next__)  # unlike addresses, never used again

    @property
    def slot(self) -> str:
        """Of an optimizer's state, which kind of it: "exp_avg"; "" for what is none."""
        return self.lives[0].slot

    def version(self) -> tuple[int, ...]:
        """Changes when the content does, as far as PyTorch and the guards can tell."""
        return (self.serial, self.epoch, *versions(self.counted))


@dataclass(frozen=True, slots=True)
class Binding:
    """What is bound now. `hosted`: state in host memory beside a CUDA training, copied when the iteration ends.

    `loose`: state that does not lie in memory as the schedule and the slots have it, with its elements copied in the
    slot's order when the iteration ends. So no change of addresses, storages or memory formats ends a run.
    """

    device: torch.device
    storages: dict[int, BoundStorage]  # by StateRow.id
    hosted: tuple[BoundStorage, ...]
    loose: tuple[Live, ...]
    absent: frozenset[StateName]  # optimizer state that never existed yet
    targets: dict[StateName, Target]
    optimizer_storages: tuple[tuple[BoundStorage, ...], ...]
    buffer_storages: dict[torch.nn.Module, tuple[BoundStorage, ...]]
    module_storages: dict[torch.nn.Module, tuple[BoundStorage, ...]]  # parameters and buffers
    sizes: tuple[int, ...]  # of the optimizers
    _tensors: list[tuple[Live, int, tuple[int, ...] | None]] = field(repr=False)  # address, strides if they may turn

    def stale(self, training: Training) -> bool:
        """Whether a tensor moved, or appeared: bind again."""
        for live, pointer, strides in self._tensors:
            if live.moved or live.tensor.data_ptr() != pointer:
                return True
            if strides is not None and live.tensor.stride() != strides:
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

    Raises InputError that names the first difference between the schedule and the training. With `fixed`, only for what
    no slot has room for: another shape or dtype, or new state.
    """
    lives = {live.name: live for live in live_state(training)}
    device = refused.device_of(live.tensor for live in lives.values())
    parameters = {stem: parameter for of_one in slot_stems(training) for stem, parameter in of_one.items()}
    targets = dict(fixed.targets) if fixed is not None else {}
    storages: dict[int, BoundStorage] = {}
    hosted: list[BoundStorage] = []
    loose: list[Live] = []
    absent: list[StateName] = []
    for row in schedule.state:
        present = [view for view in row.views if view.name in lives]
        for view in row.views:
            if view.name in lives:
                continue
            name = StateName(view.name)
            if name.holder in training.listed.objects:  # it is asked when an iteration ends
                targets.setdefault(name, Target(name, view.dtype, view.shape, tuple(range(len(view.shape)))))
                continue
            if fixed is None:
                _check_absent(name, lives)
                targets[name] = Target(name, view.dtype, view.shape, _expected(view, parameters))
            elif not name.is_optimizers:
                raise _missing(name, lives)
            if fixed is None or name in fixed.absent:
                absent.append(name)
        if not present:
            continue
        found = [_checked(view, lives) for view in present]
        if fixed is None:
            _add_targets(found, targets)
        problem = _misfit(row, found, targets)
        extra = all(live.name.is_extra for live in found)
        if problem is not None or (extra and not row.written):  # nothing may tell that it was written after all
            if fixed is None and not extra and any(live.optimizer is None for live in found):
                raise InputError(f"{problem}; {_ADVICE}")
            _check_tied(found, targets)
            loose += found
            continue
        storage = _bound(row.id, row.written, found, targets)
        if device.type == "cuda" and storage.data.device.type == "cpu":
            hosted.append(storage)
        else:
            storages[row.id] = storage
    scheduled = {view.name for row in schedule.state for view in row.views}
    more = [live for live in lives.values() if live.name.is_extra and live.name not in scheduled]
    if fixed is None:
        _add_targets(more, targets)
    unplanned = {live for live in more if live.name in targets}
    for live in lives.values():
        if live.name in scheduled or live.is_host_scalar:
            continue
        if fixed is not None and live.name not in targets and _small(live):
            continue  # the host's record takes it
        if live in unplanned:
            loose.append(live)
            continue
        _check_unscheduled(live, device, scheduled, new=fixed is not None and live.name not in targets)
        if fixed is None:
            _add_targets([live], targets)
        if memory_order(live.tensor) == targets[live.name].order:
            hosted.append(_bound(-1, False, [live], targets))
        else:
            loose.append(live)
    if fixed is not None:
        known = {storage.name: storage for storage in fixed.storages.values()}
        storages = {id_: _same(storage, known.get(storage.name)) for id_, storage in storages.items()}
    by_tensor = {id(live.tensor): storage for storage in storages.values() for live in storage.lives}
    return Binding(
        device=device,
        storages=storages,
        hosted=tuple(hosted),
        loose=tuple(loose),
        absent=frozenset(absent),
        targets=targets,
        optimizer_storages=tuple(
            _of_optimizer(number, optimizer, lives.values(), by_tensor)
            for number, optimizer in enumerate(training.optimizers)
        ),
        buffer_storages=_of_modules((live for live in lives.values() if live.buffer), by_tensor),
        module_storages=_of_modules(lives.values(), by_tensor),
        sizes=_sizes(training),
        _tensors=[
            (live, live.tensor.data_ptr(), live.tensor.stride() if live.tensor.dim() > 1 else None)
            for live in lives.values()
            if live.name in targets or not live.is_host_scalar
        ],
    )


def add_rooms(binding: Binding, tensors: Mapping[StateName, torch.Tensor]) -> None:
    """Targets for tensors that are not bound: each checkpoint is handed them when its iteration ends."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        binding.targets[name] = Target(name, name_of(tensor.dtype), shape, tuple(range(len(shape))))


_ADVICE = "attach what the schedule was compiled for, or compile it again"


def check_updated(binding: Binding, training: Training, number: int) -> None:
    """After optimizer `number` made an update: raises InputError if state that its parameters should have is absent."""
    if not binding.absent:
        return
    parameters = slot_stems(training)[number]
    for name in sorted(binding.absent):
        parameter = owner(name, parameters)
        if parameter is not None and parameter.grad is not None:
            slots = (live.name for live in live_state(training) if live.parameter is parameter)
            close = nearest(name, slots)
            raise InputError(f"{name}: in the schedule, but this optimizer has no such state{close}; {_ADVICE}")


def _check_absent(name: StateName, lives: Mapping[StateName, Live]) -> None:
    """Optimizer state may come later, unless its parameter already has other state."""
    above = next(name.above(), name)
    if not name.is_optimizers or any(other.is_inside(above) for other in lives):
        raise _missing(name, lives)


def _missing(name: StateName, lives: Mapping[StateName, Live]) -> InputError:
    key = name.listed_as
    if key is not None and not any(other.holder == name.holder for other in lives):
        return InputError(f'{name.holder}: in the schedule; list it: attach(extra={{"{key}": ...}})')
    return InputError(f"{name}: in the schedule, but not in this training{nearest(name, lives)}; {_ADVICE}")


def _checked(view: ViewRow, lives: Mapping[StateName, Live]) -> Live:
    live = lives[StateName(view.name)]
    shape, dtype = tuple(live.tensor.shape), name_of(live.tensor.dtype)
    if shape != view.shape:
        raise InputError(f"{view.name}: has shape {shape}, {view.shape} in the schedule; {_ADVICE}")
    if dtype != view.dtype:
        raise InputError(f"{view.name}: has dtype {dtype}, {view.dtype} in the schedule; {_ADVICE}")
    return live


def _add_targets(lives: Sequence[Live], targets: dict[StateName, Target]) -> None:
    """Rooms in the slots. Tied names of a model share one; an optimizer's do not, for it may part them at any time."""
    same: dict[tuple[object, ...], StateName] = {}
    for live in lives:
        tensor, shape = live.tensor, tuple(live.tensor.shape)
        order = memory_order(tensor)
        first = live.name
        if live.optimizer is None:
            key = live.name.holder, tensor.data_ptr(), shape, order
            first = same.setdefault(key, live.name)
        alias_of = None if first == live.name else first
        targets[live.name] = Target(
            live.name, name_of(tensor.dtype), shape, order or tuple(range(len(shape))), alias_of
        )


def _misfit(row: StateRow, lives: Sequence[Live], targets: Mapping[StateName, Target]) -> str | None:
    """Why bytes cannot go from the storage to the slots as planned."""
    whole = lives[0].tensor.untyped_storage()
    for live in lives:
        if live.tensor.untyped_storage().data_ptr() != whole.data_ptr():
            return f"{live.name}: tied to {lives[0].name} in the schedule, but not in this training"
        if memory_order(live.tensor) != targets[live.name].order:
            return f"{live.name}: its memory format changed"
    if whole.nbytes() != row.bytes:
        return f"{lives[0].name}: its storage has {whole.nbytes()} bytes, {row.bytes} in the schedule"
    return None


def _check_tied(lives: Sequence[Live], targets: Mapping[StateName, Target]) -> None:
    """Names that share a room have to stay one tensor."""
    by_name = {live.name: live.tensor for live in lives}
    for live in lives:
        other = by_name.get(targets[live.name].alias_of or live.name)
        if other is None or other.data_ptr() != live.tensor.data_ptr() or other.stride() != live.tensor.stride():
            raise InputError(
                f"{live.name}: was tied to {targets[live.name].alias_of} at attach, and is no longer; attach it untied"
            )


def _bound(id_: int, written: bool, lives: Sequence[Live], targets: Mapping[StateName, Target]) -> BoundStorage:
    first = lives[0].tensor
    whole = first.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=first.device).set_(whole, 0, (whole.nbytes(),), (1,))
    segments: list[Segment] = []
    for live in lives:
        tensor = live.tensor
        start = int(tensor.storage_offset()) * tensor.element_size()
        if targets[live.name].alias_of is None:
            segments.append(Segment(start, tensor.numel() * tensor.element_size(), live.name))
    counted = tuple(live.tensor for live in lives if not live.tensor.is_inference())
    return BoundStorage(id_, lives[0].name, written, data, whole.data_ptr(), tuple(lives), tuple(segments), counted)


def _same(storage: BoundStorage, old: BoundStorage | None) -> BoundStorage:
    """The storage that was bound before, where it is the same one: an offload may be reading it."""
    if old is None or old.address != storage.address or old.data.numel() != storage.data.numel():
        return storage
    old.lives, old.segments, old.counted = storage.lives, storage.segments, storage.counted
    return old


def _small(live: Live) -> bool:
    """Whether new optimizer state is little enough for the host's record."""
    return live.optimizer is not None and live.tensor.numel() * live.tensor.element_size() <= MAX_TENSOR_BYTES


def _check_unscheduled(live: Live, device: torch.device, scheduled: set[str], *, new: bool) -> None:
    on_host = device.type == "cuda" and live.tensor.device.type == "cpu"
    if live.tensor.numel() and (new or not (on_host and live.optimizer is None)):
        since = "appeared after attach and is" if new else "is state of this training, but"
        raise InputError(f"{live.name}: {since} not in the schedule{nearest(live.name, scheduled)}; {_ADVICE}")


def _expected(view: ViewRow, parameters: dict[StateName, torch.nn.Parameter]) -> tuple[int, ...]:
    """The memory order that optimizer state will have: its parameter's, where shapes agree."""
    parameter = owner(StateName(view.name), parameters)
    order = memory_order(parameter) if parameter is not None and tuple(parameter.shape) == view.shape else None
    return order if order is not None else tuple(range(len(view.shape)))


def _of_optimizer(
    number: int, optimizer: torch.optim.Optimizer, lives: Iterable[Live], by_tensor: dict[int, BoundStorage]
) -> tuple[BoundStorage, ...]:
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [live.tensor for live in lives if live.optimizer == number]
    found = (by_tensor.get(id(tensor)) for tensor in tensors)
    return tuple(dict.fromkeys(storage for storage in found if storage is not None))


def _of_modules(
    lives: Iterable[Live], by_tensor: dict[int, BoundStorage]
) -> dict[torch.nn.Module, tuple[BoundStorage, ...]]:
    found: dict[torch.nn.Module, dict[BoundStorage, None]] = {}
    for live in lives:
        storage = by_tensor.get(id(live.tensor))
        if live.module is not None and storage is not None:
            found.setdefault(live.module, {})[storage] = None
    return {module: tuple(storages) for module, storages in found.items()}
