"""An optimizer's host half: its groups' hyperparameters, which state each parameter has, and what of it is on the host.

Large tensors are the files'. Adam's step on the CPU and its like are gathered: one tensor for each entry, stacked over
all parameters that have it, because hundreds of small values one by one would cost more than the copies they describe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import is_

import torch
from torch.distributed import get_process_group_ranks

from checkflow.errors import InputError
from checkflow.state import refused
from checkflow.state.host.encode import encode, tensor_parts
from checkflow.state.host.json_values import MAX_TENSOR_BYTES, Json, RefusedError, Stored, base64_of, dump
from checkflow.state.host.own import OwnReader
from checkflow.state.live import entries
from checkflow.state.memory import as_bytes, identity, memory_order
from checkflow.state.names import StateName, file_of, stems
from checkflow.state.own import kind_of, state_of
from checkflow.state.shards import local
from checkflow.wrapped import is_zero, updated_here, updater

_IMMUTABLE = (int, float, bool, str, type(None))
_UNKNOWN = object()
IsStored = Callable[[StateName], bool]


@dataclass(slots=True)
class _Group:
    """A group as it was: keys, values and parameters; its JSON, unless a value may change in place.

    `pieces`: each value, or _UNKNOWN where it may change in place, and its JSON.
    """

    seen: tuple[object, ...]
    text: str | None
    pieces: dict[str, tuple[object, str]]


class _Column:
    """A entry's tensors on the host, of all parameters of a cohort. `head` is what comes before their bytes."""

    def __init__(self, entry: str, tensors: list[torch.Tensor]) -> None:
        self.entry = entry
        self._tensors = tensors
        self._head = ""
        self._addresses: list[int] = []
        self._views: list[memoryview] = []

    def text(self) -> str:
        """The entry and the tensors' bytes now. Raises RefusedError for what has no form.

        To stack them anew at each checkpoint would cost ten times what this does.
        """
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            parts = tensor_parts(torch.stack(self._tensors).detach().cpu())
            assert isinstance(parts, dict)
            self._head = f'{dump(self.entry)}:{{"dtype":{dump(parts["dtype"])},"shape":{dump(parts["shape"])},"data":"'
            flat = [as_bytes(tensor.detach().cpu().resolve_conj().resolve_neg()) for tensor in self._tensors]
            self._views = [memoryview(tensor.numpy()) for tensor in flat]  # type: ignore[arg-type]
            copied = [tensor.data_ptr() for tensor in flat] != addresses
            self._addresses = [] if copied else addresses
        return f'{self._head}{base64_of(b"".join(self._views))}"}}'


@dataclass(slots=True)
class _Cohort:
    """Parameters whose state has the same entries; `text` is the part of its JSON that does not change."""

    text: str
    host: list[_Column]
    values: dict[str, list[Json]]


@dataclass(slots=True)
class _Seen:
    """A parameter's state as it was when the cohorts were formed."""

    parameter: torch.Tensor
    state: Mapping[str, object]
    members: tuple[object, ...]


class OptimizerReader:
    """Reads one optimizer at each checkpoint. What did not change since the last one is not encoded again.

    Args:
        prefix: "optimizer", or "optimizer.1" of several.
        optimizer: the live one.
        names: id(parameter) -> "model/features.0.weight".
        stored: whether a file holds the tensor of a state name, "optimizer/features.0.weight.exp_avg".
    """

    def __init__(
        self, prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, StateName], stored: IsStored
    ) -> None:
        self._prefix = prefix
        self._optimizer = optimizer
        self._names = names
        self._stored = stored
        self._own = OwnReader(prefix, optimizer, names, stored)
        self._groups: dict[int, _Group] = {}
        self._stems: dict[StateName, StateName] = {}
        self._cohorts: list[_Cohort] | None = None
        self._stale = False
        self._places = ""  # JSON of what ties and orders there are
        self._seen: list[_Seen] = []
        self._keys: tuple[object, ...] = ()
        self._part: tuple[tuple[int, ...] | None, str] = (None, "")  # ids of this rank's parameters, and the text

    @property
    def structure(self) -> tuple[str, ...]:
        """Changes when other state than before has to be found in the files."""
        return (*(cohort.text for cohort in self._cohorts or ()), self._places, *self._own.structure)

    def forget(self) -> None:
        """Parameters have other names than before."""
        self._groups.clear()
        self._cohorts, self._part = None, (None, "")

    def read(self) -> str:
        """OptimizerRecord's JSON. Raises InputError that names what cannot be saved."""
        groups = self.groups()
        if self._cohorts is None or self._stale or self._changed():
            self._cohorts = self._form()
        cohorts = ",".join(self._cohort(cohort) for cohort in self._cohorts)
        kind = type(updater(self._optimizer))
        head = dump(
            {"name": self._prefix, "type": kind.__name__, "module": kind.__module__, "file": file_of(self._prefix)}
        )
        more = f"{self._places}{self._partition()}{self._own.read()}"
        text = f'{head[:-1]},"groups":[{groups}],"cohorts":[{cohorts}]{more}}}'
        self._stale = any(cohort.values for cohort in self._cohorts)  # replaced, not changed: nothing tells
        return text

    @property
    def name(self) -> str:
        """ "optimizer", or "optimizer.1" of several."""
        return self._prefix

    def _partition(self) -> str:
        """Which of its parameters this rank keeps the state of, and which ranks that of the others."""
        if not is_zero(self._optimizer) or self._optimizer.world_size == 1:
            return ""
        own = updated_here(self._optimizer)
        known = tuple(map(id, own))
        if known != self._part[0]:
            ranks = sorted(get_process_group_ranks(self._optimizer.process_group))
            found: dict[str, Json] = {"ranks": list(ranks), "parameters": list(map(self._name, own))}
            self._part = known, f',"partition":{dump(found)}'
        return self._part[1]

    def groups(self) -> str:
        """GroupRecords' JSON, as they are now. Raises InputError that names what cannot be saved."""
        return ",".join(self._group(index) for index in range(len(self._optimizer.param_groups)))

    def _group(self, index: int) -> str:
        group = self._optimizer.param_groups[index]
        seen = (*group, *group.values(), *group["params"])
        known = self._groups.get(index)
        if known is not None and known.text is not None and _identical(known.seen, seen):
            return known.text
        old = known.pieces if known is not None else {}
        stored: list[Json] = []
        pieces: dict[str, tuple[object, str]] = {}
        keep = True
        for key, value in group.items():
            piece = old.get(key)  # schedulers change one or two of a dozen
            if piece is not None and piece[0] is value:
                pieces[key] = piece
            elif isinstance(value, torch.Tensor) and self._stored(StateName.of_group(self._prefix, index, key)):
                stored.append(key)
            elif key != "params":
                text = f"{dump(key)}:{dump(encode(value, f'{self._prefix}.param_groups[{index}].{key}'))}"
                pieces[key] = (value if _immutable(value) else _UNKNOWN, text)
                keep = keep and pieces[key][0] is not _UNKNOWN
        names = dump({"parameters": [self._name(parameter) for parameter in group["params"]], "stored": stored})
        text = f'{names[:-1]},"values":{{{",".join([text for _, text in pieces.values()])}}}}}'
        self._groups[index] = _Group(seen, text if keep else None, pieces)
        return text

    def _name(self, parameter: torch.Tensor) -> StateName:
        name = self._names.get(id(parameter))
        if name is None:
            groups = enumerate(self._optimizer.param_groups)
            places = (
                (index, place) for index, group in groups for place, p in enumerate(group["params"]) if p is parameter
            )
            raise refused.stray_parameter(self._prefix, *next(places), parameter)
        return name

    def _changed(self) -> bool:
        state = updater(self._optimizer).state
        if not _identical(self._keys_now(), self._keys) or self._own.changed():
            return True
        for seen in self._seen:
            now = state.get(seen.parameter)
            if now is not seen.state or len(now) != len(seen.members) or not all(map(is_, now.values(), seen.members)):
                return True
        return False

    def _keys_now(self) -> tuple[object, ...]:
        """What has state, in its order."""
        return tuple(key for key in state_of(self._optimizer) if type(key) is not str)

    def _form(self) -> list[_Cohort]:
        self._seen, self._keys = [], self._keys_now()
        members: dict[tuple[tuple[str, str], ...], list[tuple[StateName, dict[str, object]]]] = {}
        parameters = dict.fromkeys(p for group in self._optimizer.param_groups for p in group["params"])
        self._stems = stems(self._prefix, map(self._name, parameters))
        held = updater(self._optimizer).state
        for key in state_of(self._optimizer):
            if key not in parameters and type(key) is not str:
                raise refused.stray_state(self._prefix, kind_of(self._optimizer), key)
        for parameter in parameters:
            state = held.get(parameter)
            if state is None:
                continue
            self._seen.append(_Seen(parameter, state, tuple(state.values())))
            if state:
                name = self._name(parameter)
                kinds = tuple((entry, self._kind(parameter, name, entry, value)) for entry, value in state.items())
                members.setdefault(kinds, []).append((name, state))
        self._places = self._ties_and_orders(parameters) + self._order_of_state(parameters)
        return [self._cohort_of(kinds, found) for kinds, found in members.items()]

    def _order_of_state(self, parameters: Iterable[torch.Tensor]) -> str:
        """The order in which it was made, if that is not the groups': a training may walk it."""
        held = updater(self._optimizer).state
        usual = [parameter for parameter in parameters if held.get(parameter)]
        of_state = set(usual)
        made = [parameter for parameter in held if parameter in of_state]
        if all(map(is_, made, usual)):
            return ""
        return f',"made":{dump(list(map(self._name, made)))}'

    def _ties_and_orders(self, parameters: Iterable[torch.Tensor]) -> str:
        """What a restore needs to make the state's tensors anew as they are: one for all who share it, in its order."""
        tied: dict[str, Json] = {}
        orders: dict[str, Json] = {}
        parts = {parameter: local(parameter) for parameter in parameters}
        first: dict[object, StateName] = {
            identity(part): self._name(parameter) for parameter, part in parts.items() if part.numel()
        }
        for parameter, part in parts.items():
            stem = self._stems[self._name(parameter)]
            for name, entry, _, _ in entries(updater(self._optimizer).state.get(parameter, {}), stem):
                usual = memory_order(part) if part.shape == local(entry).shape else None
                self._note_place(name, local(entry), usual, first, tied, orders)
        for name, entry in self._own.tensors().items():
            self._note_place(name, entry, None, first, tied, orders)
        laid: dict[str, Json] = {
            self._names[id(parameter)]: list(order)
            for parameter, part in parts.items()
            if (order := memory_order(part)) not in (None, tuple(range(part.dim())))
        }
        fields = (("tied", tied), ("orders", orders), ("laid", laid))
        return "".join(f",{dump(key)}:{dump(value)}" for key, value in fields if value)

    def _note_place(
        self,
        name: StateName,
        tensor: torch.Tensor,
        usual: tuple[int, ...] | None,
        first: dict[object, StateName],
        tied: dict[str, Json],
        orders: dict[str, Json],
    ) -> None:
        """`usual`: the order that it would have; `first`: the names under which storages were seen first."""
        if not tensor.numel() or not self._stored(name):
            return
        other = first.setdefault(identity(tensor), name)
        if other != name:
            tied[name.path] = other
        order = memory_order(tensor)
        if order is not None and order != (tuple(range(tensor.dim())) if usual is None else usual):
            orders[name.path] = list(order)

    def _kind(self, parameter: torch.Tensor, name: StateName, entry: object, value: object) -> str:
        """How a entry is saved; parameters with the same kinds of entries share a cohort."""
        if type(entry) is not str:
            raise refused.nameless_entry(self._prefix, name, entry)
        if not isinstance(value, torch.Tensor):
            return "value"
        apart = "apart " if value.device.type == "cpu" and parameter.device.type != "cpu" else ""
        state_name = self._stems[name].inside(entry)
        if self._stored(state_name):
            return f"{apart}stored"
        if value.numel() * value.element_size() > MAX_TENSOR_BYTES:
            raise InputError(
                f"{state_name}: a tensor of shape {tuple(value.shape)} is neither in a file of the "
                "checkpoint nor small; compile and attach with the state as it is now"
            )
        return f"{apart}host {value.dtype} {tuple(value.shape)}"

    def _cohort_of(
        self, kinds: tuple[tuple[str, str], ...], members: list[tuple[StateName, dict[str, object]]]
    ) -> _Cohort:
        host: list[_Column] = []
        values: dict[str, list[Json]] = {}
        for entry, kind in kinds:
            if kind == "value":
                values[entry] = [self._value(name, entry, state[entry]) for name, state in members]
            elif "host" in kind:
                tensors = [value for _, state in members if isinstance(value := state[entry], torch.Tensor)]
                host.append(_Column(entry, tensors))
        text = dump(
            {
                "parameters": [name for name, _ in members],
                "slots": [entry for entry, _ in kinds],
                "stored": [entry for entry, kind in kinds if kind.endswith("stored")],
                "apart": [entry for entry, kind in kinds if kind.startswith("apart")],
            }
        )
        return _Cohort(text[:-1], host, values)

    def _value(self, name: StateName, entry: str, value: object) -> Json:
        where = f"{self._prefix}.state of {name}: {entry}"
        return encode(_marked(value, self._stems[name].inside(entry), self._stored), where)

    def _cohort(self, cohort: _Cohort) -> str:
        texts = []
        for column in cohort.host:
            try:
                texts.append(column.text())
            except RefusedError as error:
                raise InputError(f"{self._prefix}.state: {column.entry} of all parameters: {error}") from None
        host = ",".join(texts)
        values: dict[str, Json] = {entry: list(found) for entry, found in cohort.values.items()}
        return f'{cohort.text},"host":{{{host}}},"values":{dump(values)}}}'


def _identical(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _immutable(value: object) -> bool:
    return isinstance(value, _IMMUTABLE) or (type(value) is tuple and all(map(_immutable, value)))


def _marked(value: object, name: StateName, stored: IsStored) -> object:
    """The same with the tensors that files hold replaced by their names within the file."""
    if isinstance(value, torch.Tensor):
        return Stored(name.path) if stored(name) else value
    if type(value) is dict:
        return {key: _marked(item, name.inside(key), stored) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_marked(item, name.inside(index), stored) for index, item in enumerate(value))
    return value
