"""An optimizer as it was: hyperparameters by group, and each parameter's state made where the optimizer keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch

from checkflow.dtypes import name_of
from checkflow.errors import FormatError, InputError
from checkflow.state.groups import IMPLEMENTATION, read_scalars
from checkflow.state.host.decode import decode, tensor_of
from checkflow.state.host.json_values import Json, RefusedError, Stored
from checkflow.state.host.record import CohortRecord, GroupRecord, OptimizerRecord
from checkflow.state.memory import laid, memory_order
from checkflow.state.names import StateName, stems
from checkflow.state.own import own_of
from checkflow.state.restore.files import FileTensor, TensorFile, Tied
from checkflow.state.restore.own import NOTHING, OwnPlan, match_own
from checkflow.state.shards import local, shared_like
from checkflow.wrapped import updated_here, updater

_ADVICE = "restore into the optimizer that was saved"


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What to set, checked. Sources are the file's tensors, small CPU tensors, or plain values."""

    optimizer: torch.optim.Optimizer
    groups: tuple[Mapping[str, object], ...]
    states: Mapping[torch.Tensor, Mapping[str, object]]  # by parameter; those that are absent have none
    apart: Mapping[torch.Tensor, frozenset[str]]  # entries that lay on the CPU while the parameter did not
    own: OwnPlan = NOTHING  # under a text, of no parameter
    takes_all: bool = True  # of the checkpoint's state; another rank takes the rest
    order: tuple[torch.Tensor, ...] = ()  # of parameters, in the optimizer's dict of state

    def apply(self) -> None:
        """Copy into the tensors that exist, create the others."""
        as_read = self._can_be_as_read()
        placing = _Placing()
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key, value in values.items():
                if key not in IMPLEMENTATION:
                    group[key] = placing.placed(value, group.get(key), _device_of(group))
            for parameter in group["params"]:
                self._apply_state(parameter, group, placing, as_read=as_read)
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        beside = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self.own.apply(self.optimizer, placing.placed, beside)

    def arrange(self) -> None:
        """Bring state, once all of it is there, into the order that it had: a training may walk it."""
        state: dict[object, Any] = updater(self.optimizer).state  # type: ignore[assignment]
        wanted = [parameter for parameter in self.order if parameter in state]
        known = set(wanted)
        if all(map(is_, wanted, (key for key in state if key in known))):
            return
        for key in (*wanted, *(key for key in tuple(state) if type(key) is str)):
            state[key] = state.pop(key)

    def _can_be_as_read(self) -> bool:
        """Whether all state is new and lies as in the file. One tensor alone would keep all of the file in memory."""
        if not self.takes_all:
            return False
        for parameter, values in self.states.items():
            now = updater(self.optimizer).state.get(parameter, {})
            for entry, value in values.items():
                if isinstance(value, FileTensor) and (entry in now or not _lies_as(parameter, value)):
                    return False
        return True

    def _apply_state(
        self, parameter: torch.Tensor, group: Mapping[str, object], placing: _Placing, *, as_read: bool
    ) -> None:
        values = self.states.get(parameter)
        if values is None:
            updater(self.optimizer).state.pop(parameter, None)
            return
        state = updater(self.optimizer).state[parameter]
        made = {}
        for entry, value in values.items():
            now = state.get(entry)
            part = local(now) if isinstance(now, torch.Tensor) else now
            placed = placing.placed(
                value, part, self._device(parameter, entry, group, parameter.device), local(parameter), as_read=as_read
            )
            made[entry] = now if placed is part else shared_entry(placed, entry, parameter)
        state.clear()
        state.update(made)

    def made(self, parameter: torch.Tensor, like: torch.Tensor) -> dict[str, object]:
        """A parameter's state for another tensor like it, which shares nothing with what is live."""
        group = next(group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"]))
        placing = _Placing()
        return {
            entry: placing.placed(value, None, self._device(parameter, entry, group, like.device), like)
            for entry, value in self.states[parameter].items()
        }

    def _device(
        self, parameter: torch.Tensor, entry: str, group: Mapping[str, object], beside: torch.device
    ) -> torch.device:
        """Where an entry lies, of a parameter that is on a device."""
        on_host = entry in self.apart.get(parameter, ())
        if entry == "step":  # torch's own rule
            on_host = not read_scalars(group)
        return torch.device("cpu") if on_host else beside


def match_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, StateName], record: OptimizerRecord, file: TensorFile
) -> OptimizerPlan:
    """The plan. Raises InputError that names the first difference, FormatError for what no optimizer wrote."""
    prefix = record.name
    kind = type(updater(optimizer)).__name__
    if kind != record.type:
        raise InputError(f"{prefix}: is {kind}, {record.type} in the checkpoint; {_ADVICE}")
    _match_groups(prefix, optimizer, names, record.groups)
    parameters: dict[str, torch.Tensor] = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    file = _as_it_lay(file, record, parameters)
    stem = stems(prefix, (StateName(name) for group in record.groups for name in group.parameters))
    groups = tuple(_group(prefix, number, group, file) for number, group in enumerate(record.groups))
    own = set(updated_here(optimizer))
    states: dict[torch.Tensor, Mapping[str, object]] = {}
    apart: dict[torch.Tensor, frozenset[str]] = {}
    for cohort in record.cohorts:
        for name, values in _states(prefix, cohort, file, stem).items():
            parameter = parameters.get(name)
            if parameter is None or parameter in states:
                raise FormatError(
                    f"{prefix}: has state for {name!r:.200}, not once in its groups; take another checkpoint"
                )
            _check_existing(f"{prefix}.state of {name}", updater(optimizer).state.get(parameter, {}), values)
            states[parameter], apart[parameter] = values, frozenset(cohort.apart)
    under_text = match_own(record, parameters, lambda value: _resolved(prefix, value, file))
    _check_existing(f"{prefix}.state", own_of(optimizer), under_text.values)
    kept = {parameter: values for parameter, values in states.items() if parameter in own}
    names_in_order = dict.fromkeys((*record.made, *parameters))
    return OptimizerPlan(
        optimizer,
        groups,
        kept,
        apart,
        under_text,
        takes_all=len(kept) == len(states),
        order=tuple(parameters[name] for name in names_in_order if name in parameters),
    )


def stored_in(record: OptimizerRecord) -> Iterator[str]:
    """The names of its state's tensors in the file, of which another rank has what it says of its groups."""
    stem = stems(record.name, (StateName(name) for group in record.groups for name in group.parameters))
    for cohort in record.cohorts:
        known = [stem[name] for each in cohort.parameters if (name := StateName(each)) in stem]
        yield from (name.inside(entry).path for name in known for entry in cohort.stored)
        for entry, values in cohort.values.items():
            for value in values:
                yield from _names_in(decode(value, f"{record.name}.state: {entry:.80}"))


def _device_of(group: Mapping[str, Any]) -> torch.device:
    """Where a group's parameters are. It may have none."""
    return next((parameter.device for parameter in group["params"]), torch.device("cpu"))


def _names_in(value: object) -> Iterator[str]:
    if isinstance(value, Stored):
        yield value.name
    elif type(value) is dict:
        yield from (name for item in value.values() for name in _names_in(item))
    elif type(value) is list or type(value) is tuple:
        yield from (name for item in value for name in _names_in(item))


def _match_groups(
    prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, StateName], records: tuple[GroupRecord, ...]
) -> None:
    if len(optimizer.param_groups) != len(records):
        count = len(optimizer.param_groups)
        lacks = count < len(records)
        advice = "add those that the training had by then, and call restore() again" if lacks else _ADVICE
        raise InputError(f"{prefix}: has {count} param_groups, {len(records)} in the checkpoint; {advice}")
    for number, (group, record) in enumerate(zip(optimizer.param_groups, records, strict=True)):
        where = f"{prefix}.param_groups[{number}]"
        ours = [names.get(id(parameter), "a tensor of no model") for parameter in group["params"]]
        for position, (name, saved) in enumerate(zip(ours, record.parameters, strict=False)):
            if name != saved:
                raise InputError(f"{where}: parameter {position} is {name}, {saved} in the checkpoint; {_ADVICE}")
        if len(ours) != len(record.parameters):
            raise InputError(
                f"{where}: has {len(ours)} parameters, {len(record.parameters)} in the checkpoint; {_ADVICE}"
            )


def _group(prefix: str, number: int, record: GroupRecord, file: TensorFile) -> Mapping[str, object]:
    where = f"{prefix}.param_groups[{number}]"
    values = {key: decode(value, f"{where}.{key}") for key, value in record.values.items()}
    for key in record.stored:
        values[key] = _stored(prefix, StateName.of_group(prefix, number, key).path, file)
    if "params" in values:
        raise FormatError(f"{where}: has 'params' among its values; take another checkpoint")
    return values


def _as_it_lay(file: TensorFile, record: OptimizerRecord, parameters: Mapping[str, torch.Tensor]) -> TensorFile:
    """The file with the ties and memory orders that the record tells of."""
    tensors, live = dict(file.tensors), {}
    for name, order in record.orders.items():
        found = tensors.get(name)
        if found is None or sorted(order) != list(range(len(found.shape))):
            raise FormatError(f"{record.name}: {name!r:.200} has no order {order!s:.80}; take another checkpoint")
        tensors[name] = replace(found, order=order)
    for name, first in record.tied.items():
        other = StateName(first)
        if other.holder == record.name and other.path in tensors:
            tensors[name] = tensors[other.path]
        elif first in parameters:
            live[name] = Tied(parameters[first])
        else:
            raise FormatError(
                f"{record.name}: {name!r:.200} is tied to {first!r:.200}, which is not there; take another checkpoint"
            )
    return TensorFile(tensors, file.aliases, live)


def _states(
    prefix: str, cohort: CohortRecord, file: TensorFile, stem: Mapping[StateName, StateName]
) -> dict[str, dict[str, object]]:
    columns: dict[str, list[object]] = {}
    count = len(cohort.parameters)
    for entry in cohort.slots:
        where = f"{prefix}.state: {entry:.80}"
        if entry in cohort.stored:
            known = (stem.get(StateName(parameter)) for parameter in cohort.parameters)
            names = (name.inside(entry).path for name in known if name is not None)
            columns[entry] = [_stored(prefix, name, file) for name in names]
        elif entry in cohort.host:
            columns[entry] = list(_stacked(where, cohort.host[entry], count))
        else:
            values = cohort.values.get(entry, ())
            columns[entry] = [_resolved(prefix, decode(value, where), file) for value in values]
        if len(columns[entry]) != count:
            raise FormatError(f"{where}: has not one value for each parameter; take another checkpoint")
    if sorted(columns) != sorted({*cohort.stored, *cohort.host, *cohort.values}) or len(columns) != len(cohort.slots):
        raise FormatError(f"{prefix}.state: its entries do not belong together; take another checkpoint")
    return {name: {entry: columns[entry][row] for entry in cohort.slots} for row, name in enumerate(cohort.parameters)}


def _stacked(where: str, value: Json, count: int) -> tuple[torch.Tensor, ...]:
    try:
        stacked = tensor_of(value)
    except RefusedError as refused:
        raise FormatError(f"{where}: {refused}; take another checkpoint") from None
    if stacked.dim() == 0 or len(stacked) != count:
        raise FormatError(f"{where}: has not one value for each parameter; take another checkpoint")
    return tuple(row.clone() for row in stacked)


def _stored(prefix: str, name: str, file: TensorFile) -> FileTensor | Tied:
    found = file.live.get(name) or file.tensors.get(file.aliases.get(name, name))
    if found is None:
        raise FormatError(f"{prefix}: its file has no tensor {name!r:.200}; take another checkpoint")
    return found


def _resolved(prefix: str, value: object, file: TensorFile) -> object:
    if isinstance(value, Stored):
        return _stored(prefix, value.name, file)
    if type(value) is dict:
        return {key: _resolved(prefix, item, file) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_resolved(prefix, item, file) for item in value)
    return value


def _check_existing(where: str, state: Mapping[str, object], values: Mapping[str, object]) -> None:
    for entry, value in values.items():
        now = state.get(entry)
        if isinstance(now, torch.Tensor) and isinstance(value, (torch.Tensor, FileTensor)):
            now = local(now)
            ours, saved = (tuple(now.shape), now.dtype), (tuple(value.shape), value.dtype)
            if ours != saved:
                raise InputError(f"{where}: {entry} is {_said(*ours)}, {_said(*saved)} in the checkpoint; {_ADVICE}")


def _said(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{name_of(dtype)}{list(shape)}"


def _lies_as(parameter: torch.Tensor, value: FileTensor) -> bool:
    """Whether torch's zeros_like of the parameter would lie in memory as the file's tensor does."""
    part = local(parameter)
    here = part.device.type == "cpu" and tuple(part.shape) == value.shape
    return here and value.order is None and part.stride() == value.view().stride()


def shared_entry(value: object, entry: str, parameter: torch.Tensor) -> object:
    """An entry that is new, as ranks share its parameter; `step` and its like each rank has by itself."""
    if isinstance(value, torch.Tensor) and entry != "step" and value.shape == local(parameter).shape:
        return shared_like(value, parameter)
    return value


class _Placing:
    """Makes values where the optimizer keeps them. What is one tensor in the checkpoint is one tensor here."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}  # by id of the file's tensor
        self._filled: set[int] = set()  # addresses

    def placed(
        self,
        value: object,
        now: object,
        device: torch.device,
        like: torch.Tensor | None = None,
        *,
        as_read: bool = False,
    ) -> object:
        """The value for a place where `now` is: its tensors copied into what is there, or made on the device."""
        if isinstance(value, Tied):
            return value.tensor.detach()
        if isinstance(value, FileTensor):
            if id(value) not in self._made:
                self._made[id(value)] = value.view() if as_read else self._tensor(value, now, device, like)
            return self._made[id(value)]
        if isinstance(value, torch.Tensor):
            return self._copied(value, now, device, like)
        if type(value) is dict:
            nows = now if isinstance(now, dict) else {}
            return {key: self.placed(item, nows.get(key), device, like) for key, item in value.items()}
        if type(value) is list or type(value) is tuple:
            return type(value)(self.placed(item, None, device, like) for item in value)
        return value

    def _tensor(self, value: FileTensor, now: object, device: torch.device, like: torch.Tensor | None) -> torch.Tensor:
        if value.order is None or (isinstance(now, torch.Tensor) and memory_order(now) == value.order):
            return self._copied(value.view(), now, device, like)
        return laid(value.view(), value.order, device)

    def _can_take(self, now: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether each element has a place of its own there; not if it is tied here to what differs there."""
        if now.shape != value.shape or now.dtype != value.dtype or (0 in now.stride() and memory_order(now) is None):
            return False
        return now.data_ptr() not in self._filled or not now.numel() or torch.equal(now.cpu(), value.cpu())

    def _copied(
        self, value: torch.Tensor, now: object, device: torch.device, like: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(now, torch.Tensor) and self._can_take(now, value):
            self._filled.add(now.data_ptr())
            with torch.no_grad():
                return now.copy_(value)
        if like is not None and like.shape == value.shape:  # memory order as torch's zeros_like would choose
            return torch.empty_like(like, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
        return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)
