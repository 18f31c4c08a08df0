"""Which modules, parameters and buffers a training has: while these are the same, no state of a module came or went.

Asked in each iteration, so what is compared is gathered without a loop in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
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

    _children: list[dict[str, Any]]  # of each module
    _tensors: list[dict[str, Any]]  # its parameters, and its buffers
    _passing: list[set[str]]  # names of those that are not persistent
    _names: Sequence[Set[str]]  # in all these
    _modules: list[object]
    _absent: list[bool]  # which of the tensors are None

    @classmethod
    def of(cls, training: Training) -> Members:
        parts = [part for module in modules_of(training).values() for part in unwrapped(module).modules()]
        children = list(map(own_modules, parts))
        tensors = [held for part in parts for held in (own_parameters(part), own_buffers(part))]
        passing = list(map(passing_buffers, parts))
        names = list(map(frozenset[str], chain(children, tensors, passing)))
        return cls(children, tensors, passing, names, _values(children), _are_none(tensors))

    def changed(self) -> bool:
        """Whether a module is another one, or there are other names, or a tensor came in the place of None."""
        names = [*map(dict.keys, self._children), *map(dict.keys, self._tensors), *self._passing]
        return (
            names != self._names
            or not all(map(is_, _values(self._children), self._modules))
            or _are_none(self._tensors) != self._absent
        )


def _values(dicts: Iterable[Mapping[str, Any]]) -> list[object]:
    return list(chain.from_iterable(map(dict.values, dicts)))  # type: ignore[arg-type]


def _are_none(dicts: Iterable[Mapping[str, Any]]) -> list[bool]:
    return list(map(is_, _values(dicts), repeat(None)))
