"""What an optimizer kept under a text, put back: each tensor into the one that is there, or made where it lay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from checkflow.errors import FormatError
from checkflow.state.host.decode import decode
from checkflow.state.host.json_values import Named, Stored
from checkflow.state.host.record import OptimizerRecord
from checkflow.state.names import StateName
from checkflow.state.own import own_of, state_of

Placed = Callable[[object, object, torch.device], object]
"""A value for a place where there is another now, if any, on a device."""


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What to set, by its text. `apart`: tensors that lay on the CPU while parameters did not, by their names in the
    file; `parameters`: by name, those that are keys."""

    holder: str
    values: Mapping[str, object] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def apply(self, optimizer: torch.optim.Optimizer, placed: Placed, beside: torch.device) -> None:
        """`beside`: where its parameters are. What was not there then goes."""
        state, now = state_of(optimizer), own_of(optimizer)
        for key in now.keys() - self.values.keys():
            del state[key]
        for key, value in self.values.items():
            state[key] = self._made(value, now.get(key), StateName.of_own(self.holder, key), placed, beside)

    def _made(self, value: object, now: object, name: StateName, placed: Placed, beside: torch.device) -> object:
        if type(value) is dict:
            held = now if isinstance(now, dict) else {}
            made: dict[object, object] = {}
            for key, item in value.items():
                called, ours = (key.name, self.parameters[key.name]) if isinstance(key, Named) else (key, key)
                made[ours] = self._made(item, held.get(ours), name.inside(called), placed, beside)
            return made
        if type(value) is list or type(value) is tuple:
            held_items = now if type(now) is type(value) and len(now) == len(value) else [None] * len(value)
            pairs = enumerate(zip(value, held_items, strict=True))
            return type(value)(self._made(item, held, name.inside(at), placed, beside) for at, (item, held) in pairs)
        return placed(value, now, torch.device("cpu") if name.path in self.apart else beside)


NOTHING = OwnPlan("optimizer")


def match_own(
    record: OptimizerRecord, parameters: Mapping[str, torch.Tensor], resolved: Callable[[object], object]
) -> OwnPlan:
    """The plan; `resolved`: a value with the file's tensors in it. Raises FormatError for what no optimizer wrote."""
    if record.own is None:
        return OwnPlan(record.name)
    values = {key: decode(value, f"{record.name}.state: {key:.80}") for key, value in record.own.values.items()}
    for key, value in values.items():
        for name in _keys_in(value):
            if name not in parameters:
                raise FormatError(
                    f"{record.name}.state: {key:.80} is of {name!r:.200}, not in its groups; take another checkpoint"
                )
    made = {key: resolved(value) for key, value in values.items()}
    return OwnPlan(record.name, made, frozenset(record.own.apart), parameters)


def own_stored_in(record: OptimizerRecord) -> list[str]:
    """The names of its tensors in the file."""
    own = {} if record.own is None else record.own.values
    return [
        each.name
        for key, value in own.items()
        for each in _leaves(decode(value, f"{record.name}.state: {key:.80}"))
        if isinstance(each, Stored)
    ]


def _keys_in(value: object) -> Iterator[str]:
    """Of parameters that are keys."""
    if isinstance(value, dict):
        yield from (key.name for key in value if isinstance(key, Named))
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _keys_in(item)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value
