"""What is bound: the state storages of a training, and its rooms in the slots. `matching` finds them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

import torch

from checkflow.dtypes import name_of
from checkflow.runtime.device import CopyEvent
from checkflow.schedule import Schedule
from checkflow.state.live import Live, held_in, is_held
from checkflow.state.members import Members
from checkflow.state.names import StateName, gradient_name
from checkflow.state.own import own_of
from checkflow.torch_internals import versions
from checkflow.training import Training
from checkflow.wrapped import received, updater


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
    reading: CopyEvent | None = None  # the latest offload that reads it live
    serial: int = field(default_factory=count().__next__)  # unlike addresses, never used again

    @property
    def entry(self) -> str:
        """Of an optimizer's state, which kind of it: "exp_avg"; "" for what is none."""
        return self.lives[0].entry

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
    received_storages: tuple[tuple[BoundStorage, ...], ...]  # of these, what step() writes with other ranks' updates
    buffer_storages: dict[torch.nn.Module, tuple[BoundStorage, ...]]
    module_storages: dict[torch.nn.Module, tuple[BoundStorage, ...]]  # parameters and buffers
    sizes: tuple[int, ...]  # of the optimizers
    _tensors: list[tuple[Live, int, tuple[int, ...] | None]] = field(repr=False)  # address, strides if they may turn
    _held: list[tuple[object, object, object]] = field(repr=False)  # what leads to those of optimizers
    _members: Members = field(repr=False)  # and of modules
    lanes: dict[StateName, int] = field(repr=False)  # of a target that only slots of one lane have

    @classmethod
    def of(
        cls,
        training: Training,
        lives: Collection[Live],
        storages: dict[int, BoundStorage],
        *,
        device: torch.device,
        hosted: tuple[BoundStorage, ...],
        loose: tuple[Live, ...],
        absent: frozenset[StateName],
        targets: dict[StateName, Target],
        lanes: dict[StateName, int],
    ) -> Binding:
        """With each storage under the optimizer that updates it, and the modules that have it."""
        by_tensor = {id(live.held): storage for storage in storages.values() for live in storage.lives}
        return cls(
            device=device,
            storages=storages,
            hosted=hosted,
            loose=loose,
            absent=absent,
            targets=targets,
            lanes=lanes,
            optimizer_storages=tuple(
                _of_optimizer(number, optimizer, lives, by_tensor)
                for number, optimizer in enumerate(training.optimizers)
            ),
            received_storages=tuple(_storages(received(optimizer), by_tensor) for optimizer in training.optimizers),
            buffer_storages=_of_modules((live for live in lives if live.buffer), by_tensor),
            module_storages=_of_modules(lives, by_tensor),
            sizes=sizes_of(training),
            _held=list(held_in(training)),
            _members=Members.of(training),
            _tensors=[
                (live, live.tensor.data_ptr(), live.tensor.stride() if live.tensor.dim() > 1 else None)
                for live in lives
                if live.name in targets or not live.is_host_scalar
            ],
        )

    @property
    def is_misplaced(self) -> bool:
        """Whether some state cannot go to the slots as planned."""
        return bool(self.loose or self.hosted or self.absent)

    def stale(self, training: Training) -> bool:
        """Whether a tensor moved, or came, or went: bind again."""
        for live, pointer, strides in self._tensors:
            if live.moved or live.tensor.data_ptr() != pointer:
                return True
            if strides is not None and live.tensor.stride() != strides:
                return True
        if not all(is_held(*each) for each in self._held):
            return True
        return self._members.changed() or sizes_of(training) != self.sizes


def sizes_of(training: Training) -> tuple[int, ...]:
    """For each optimizer, how many parameters it has and how many entries of state."""
    sizes: list[int] = []
    for optimizer in training.optimizers:
        sizes.append(sum(len(group["params"]) for group in optimizer.param_groups))
        sizes.append(sum(map(_size_of, updater(optimizer).state.values())))
        sizes.append(sum(map(_whole_size_of, own_of(optimizer).values())))
    return tuple(sizes)


def _size_of(entries: object) -> int:
    return len(entries) if isinstance(entries, (Mapping, list, tuple)) else 1


def _whole_size_of(value: object) -> int:
    """With what is nested in it."""
    if isinstance(value, (dict, list, tuple)):
        return 1 + sum(map(_whole_size_of, value.values() if isinstance(value, dict) else value))
    return 1


def _of_optimizer(
    number: int, optimizer: torch.optim.Optimizer, lives: Iterable[Live], by_tensor: dict[int, BoundStorage]
) -> tuple[BoundStorage, ...]:
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [live.held for live in lives if live.optimizer == number]
    return _storages(tensors, by_tensor)


def _storages(tensors: Iterable[torch.Tensor], by_tensor: dict[int, BoundStorage]) -> tuple[BoundStorage, ...]:
    found = (by_tensor.get(id(tensor)) for tensor in tensors)
    return tuple(dict.fromkeys(storage for storage in found if storage is not None))


def _of_modules(
    lives: Iterable[Live], by_tensor: dict[int, BoundStorage]
) -> dict[torch.nn.Module, tuple[BoundStorage, ...]]:
    found: dict[torch.nn.Module, dict[BoundStorage, None]] = {}
    for live in lives:
        storage = by_tensor.get(id(live.held))
        if live.module is not None and storage is not None:
            found.setdefault(live.module, {})[storage] = None
    return {module: tuple(storages) for module, storages in found.items()}


def add_gradient_rooms(binding: Binding, schedule: Schedule) -> None:
    """Targets for gradients, which lie in memory as their parameters do. Where there are lanes, each has its own.

    Factors of one lie there one after the other, as a vector.
    """
    gradients = {row.id: row for row in schedule.gradients}
    for row in schedule.actions:
        if row.tensor in gradients:
            view, factor_rows = gradients[row.tensor].parameter, gradients[row.tensor].factor_rows
            name = gradient_name(row.back if schedule.lanes == 1 else 0, view.name)
            shape, order = view.shape, binding.targets[StateName(view.name)].order
            if factor_rows:
                shape, order = (factor_rows * sum(view.shape),), (0,)
            binding.targets[name] = Target(name, view.dtype, shape, order)


def lanes_of(schedule: Schedule) -> dict[StateName, int]:
    """Of what only one kind of slots has, which; of nothing where there is one kind."""
    lanes = schedule.rebuilt()
    found = {StateName(view.name): lanes[row.id] for row in schedule.state if row.id in lanes for view in row.views}
    if schedule.replica:
        found |= {gradient_name(0, row.parameter.name): schedule.slot_lanes - 1 for row in schedule.gradients}
    return found


def add_rooms(binding: Binding, tensors: Mapping[StateName, torch.Tensor]) -> None:
    """Targets for tensors that are not bound: each checkpoint is handed them when its iteration ends."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        binding.targets[name] = Target(name, name_of(tensor.dtype), shape, tuple(range(len(shape))))
