"""Which modules, parameters and buffers a training has: while these are the same, no state of a module came or went.

Asked in each iteration, so what is compared is gathered without a loop in Python.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import Any

from checkflow.state.holders import modules_of, unwrapped
from checkflow.torch_internals import own_buffers, own_modules, own_parameters, passing_buffers
from checkflow.training import Training


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """As they were when this was made. Another tensor in the place of one is none of it."""

    _all: list[Collection[str]]  # each module's children, parameters and buffers, and names of buffers not persistent
    _lengths: list[int]  # of these: where one is another none of the rest is looked at
    _named: list[Collection[str]]  # those that are not empty, as most are
    _names: list[str]  # in them, one after the other
    _children: list[dict[str, Any]]  # of them
    _modules: list[object]
    _tensors: list[dict[str, Any]]  # of them, parameters and buffers
    _absent: list[bool]  # which of the tensors are None

    @classmethod
    def of(cls, training: Training) -> Members:
        parts = [part for module in modules_of(training).values() for part in unwrapped(module).modules()]
        children = list(map(own_modules, parts))
        tensors = [held for part in parts for held in (own_parameters(part), own_buffers(part))]
        every: list[Collection[str]] = [*children, *tensors, *map(passing_buffers, parts)]
        children, tensors = list(filter(None, children)), list(filter(None, tensors))
        named = list(filter(None, every))
        modules, absent = _values(children), _are_none(tensors)
        return cls(every, list(map(len, every)), named, _joined(named), children, modules, tensors, absent)

    def changed(self) -> bool:
        """Whether a module is another one, or there are other names, or a tensor came in the place of None."""
        return (
            list(map(len, self._all)) != self._lengths
            or _joined(self._named) != self._names
            or not all(map(is_, _values(self._children), self._modules))
            or _are_none(self._tensors) != self._absent
        )


def _joined(named: Iterable[Collection[str]]) -> list[str]:
    return list(chain.from_iterable(named))


def _values(dicts: Iterable[Mapping[str, Any]]) -> list[object]:
    return list(chain.from_iterable(map(dict.values, dicts)))  # type: ignore[arg-type]


def _are_none(dicts: Iterable[Mapping[str, Any]]) -> list[bool]:
    return list(map(is_, _values(dicts), repeat(None)))
