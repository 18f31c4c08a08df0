"""What listed containers have in common with each other or with state, and will not after a restore."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from checkflow.extra import Holder, Variables, with_leaves
from checkflow.state.host.json_values import Array
from checkflow.state.live import live_state
from checkflow.state.names import StateName
from checkflow.training import Training

_Asked = Mapping[str, Holder | Variables]
_CONTAINERS = frozenset({list, dict, set, OrderedDict, Counter, deque})  # that can be changed
_MAX_WORK = 10_000  # of finding out whether what lies between each other's elements has some in common


def in_common(training: Training) -> Iterator[str]:
    """A line for each container, when a training is attached."""
    asked = _asked(training)
    if asked:
        yield from _memory(training, asked)
        yield from _containers(asked).values()


class Since:
    """Containers that come to be in two listed ones as training goes: seldom looked for, and told of once."""

    def __init__(self, training: Training) -> None:
        self._asked = _asked(training)
        self._told = set(_containers(self._asked))
        self._ended = 0

    def ended(self) -> Iterator[str]:
        """An iteration has ended that is saved: looks after the first, second, fourth, eighth and so on."""
        self._ended += 1
        if len(self._asked) > 1 and self._ended.bit_count() == 1:
            for pair, line in _containers(self._asked).items():
                if pair not in self._told:
                    self._told.add(pair)
                    yield line


def _asked(training: Training) -> _Asked:
    """An object of a class is not asked here, for that may change it."""
    objects = training.listed.objects
    return {holder: member for holder, member in objects.items() if isinstance(member, (Holder, Variables))}


def _containers(asked: _Asked) -> dict[tuple[str, str], str]:
    """What two of them have in common, a line for each two. What one alone has twice is restored so."""
    met: dict[int, tuple[str, str, object]] = {}  # by id: whose it was met as first, its name, and it: it stays its own
    for holder, member in asked.items():
        if isinstance(member, Holder):
            met.setdefault(id(member.held), (holder, holder, member.held))
    found: dict[tuple[str, str], str] = {}
    for holder, member in asked.items():
        within: set[int] = set()
        for path, part in _parts("", member.state_dict(), within):
            name = str(StateName.of(holder, path))
            first, other, _ = met.setdefault(id(part), (holder, name, part))
            if first != holder and (holder, first) not in found:
                found[holder, first] = (
                    f"{name}: is the same {type(part).__name__} as {other}, and will not be after a restore; keep both "
                    "in one dict and list that, where what is the same stays so"
                )
    return found


def _parts(path: str, value: object, met: set[int]) -> Iterator[tuple[str, object]]:
    """Containers within a container, each once, by the path there."""
    if type(value) not in _CONTAINERS and type(value) is not tuple:
        return
    items = value.items() if isinstance(value, dict) else enumerate(tuple(value))  # type: ignore[arg-type]
    for key, item in items:
        if id(item) not in met and (type(item) in _CONTAINERS or type(item) is tuple):
            met.add(id(item))
            below = f"{path}.{key}" if path else f"{key}"
            if type(item) is not tuple:
                yield below, item
            yield from _parts(below, item, met)


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Where a tensor or an array lies; `view`: an array of the same elements, of which nothing is read."""

    name: StateName
    place: str
    view: Array
    is_asked: bool

    @property
    def address(self) -> int:
        return int(self.view.__array_interface__["data"][0])

    @property
    def bounds(self) -> tuple[int, int]:
        ends = [(size - 1) * stride for size, stride in zip(self.view.shape, self.view.strides, strict=True)]
        begin = self.address + sum(end for end in ends if end < 0)
        return begin, self.address + sum(end for end in ends if end > 0) + self.view.itemsize

    def shares(self, other: _Lying) -> bool:
        """Whether they have an element in common, or nobody can say soon."""
        try:
            return np.shares_memory(self.view, other.view, max_work=_MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


class _Interface:
    """A tensor's memory as NumPy asks for it, on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _memory(training: Training, asked: _Asked) -> Iterator[str]:
    """Tensors and arrays in containers that have bytes in common with others that are saved."""
    lying = [
        _Lying(live.name, str(live.tensor.device), np.asarray(_Interface(live.tensor)), is_asked=False)
        for live in live_state(training)
        if _has_bytes(live.tensor)
    ]
    for holder, member in asked.items():
        lying += _in_container(holder, member)
    found: dict[str, list[tuple[StateName, StateName]]] = {}
    for number, other in sorted(_overlapping(lying).items()):
        if lying[number].is_asked:
            found.setdefault(lying[number].name.holder, []).append((lying[number].name, lying[other].name))
    for shared in found.values():
        (name, other_name), more = shared[0], f" ({len(shared) - 1} more have so)" if len(shared) > 1 else ""
        yield (
            f"{name}: has memory in common with {other_name}{more}, and will not after a restore, which gives it "
            "memory of its own; list one of them, and take the other from it"
        )


def _in_container(holder: str, member: Holder | Variables) -> list[_Lying]:
    """An array that is there twice is restored as one, so it counts once."""
    found: list[_Lying] = []
    arrays: set[int] = set()

    def note(path: str, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and _has_bytes(leaf):
            view = np.asarray(_Interface(leaf))
            found.append(_Lying(StateName.of(holder, path), str(leaf.device), view, is_asked=True))
        elif isinstance(leaf, np.ndarray) and leaf.size and id(leaf) not in arrays:
            arrays.add(id(leaf))
            found.append(_Lying(StateName.of(holder, path), "cpu", leaf, is_asked=True))
        return leaf

    with_leaves(member.state_dict(), (torch.Tensor, np.ndarray), note)
    return found


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _overlapping(lying: list[_Lying]) -> dict[int, int]:
    """By number: with which of those before it, it has memory in common."""
    found: dict[int, int] = {}
    alike: dict[tuple[object, ...], int] = {}
    reaching: list[int] = []  # those that begin before and may end after
    for number in sorted(range(len(lying)), key=lambda number: (lying[number].place, lying[number].bounds, number)):
        one = lying[number]
        first = alike.setdefault((one.place, one.address, one.view.itemsize, one.view.shape, one.view.strides), number)
        if first != number:
            found[number] = first
            continue
        reaching = [
            each for each in reaching if lying[each].place == one.place and lying[each].bounds[1] > one.bounds[0]
        ]
        for other in reaching:
            if one.shares(lying[other]):
                earlier, later = sorted((number, other))
                found[later] = min(earlier, found.get(later, earlier))
        reaching.append(number)
    return found
