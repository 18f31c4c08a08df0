"""Orders that torchdata's StatefulDataLoader would draw anew after a resume: samplers that are not its own.

It skips what it has given of an order, and asks the sampler for that order again. A sampler that draws random numbers
gives another one then. Such a sampler is wrapped: its order is drawn with what it was drawn with at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from checkflow.epochs import samplers_in
from checkflow.errors import InputError
from checkflow.extra import Stateful
from checkflow.state.host.rng import RngReader, RngRecord, match_rng

_COMPARED = 64  # indices, or batches of them, of two orders


def draws_itself(loader: object) -> bool:
    """Whether it is a StatefulDataLoader that asks a sampler what to give."""
    if not isinstance(loader, torch.utils.data.DataLoader) or not _is_torchdatas(type(loader), "StatefulDataLoader"):
        return False
    return not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def keep_order(name: str, loader: Any) -> None:
    """Have a StatefulDataLoader resume the order that its sampler drew. Other loaders are left alone.

    Nothing is changed where the sampler is torchdata's own, has state_dict or set_epoch, or draws nothing. Raises
    InputError for a sampler whose order cannot be drawn again: it differs with all generators as they were.
    """
    if not draws_itself(loader):
        return
    batches: Any = loader.batch_sampler
    if batches is not None and _is_torchdatas(type(batches), "BatchSampler"):
        batches.sampler = _kept(name, batches.sampler)  # it asks the sampler's order for its state
        return
    where = "sampler" if batches is None else "batch_sampler"
    vars(loader)[where] = _kept(name, vars(loader)[where])  # DataLoader itself lets nobody set it


def _is_torchdatas(kind: type, name: str) -> bool:
    return any(each.__name__ == name and each.__module__.startswith("torchdata.") for each in kind.__mro__)


def _kept(name: str, sampler: Any) -> Any:
    if isinstance(sampler, (RedrawnSampler, Stateful, torch.utils.data.SequentialSampler)) or _trusted(sampler):
        return sampler
    if getattr(type(sampler).__iter__, "__module__", "").startswith("torchdata."):  # its orders have a position
        return sampler
    found = generators_of(sampler)
    draws = _draws(name, sampler, found, "or give the sampler state_dict and load_state_dict")
    return RedrawnSampler(name, sampler, found) if draws else sampler


def check_drawn_again(name: str, sampler: Any) -> None:
    """Raise InputError for a sampler whose order differs with all generators as they were."""
    if not _trusted(sampler):
        _draws(name, sampler, generators_of(sampler), "or by the number of the pass, which set_epoch is given")


def _draws(name: str, sampler: Any, found: Mapping[str, torch.Generator], otherwise: str) -> bool:
    """Whether its order moves a generator; all stay as they are."""
    reader = RngReader()
    before = reader.read(found)
    first = list(islice(sampler, _COMPARED))
    drew = reader.read(found) != before
    _set(before, found)
    again = list(islice(sampler, _COMPARED))
    _set(before, found)
    if first != again:
        raise InputError(
            f"{name}: its sampler, a {type(sampler).__name__}, gives another order each time, and not from torch's, "
            "NumPy's or Python's global generators or a torch.Generator of its own; draw it from one of these, "
            f"{otherwise}"
        )
    return drew


def _trusted(sampler: Any) -> bool:
    """Whether its order is a function of an epoch that it is told."""
    inner = getattr(sampler, "sampler", None)
    return callable(getattr(sampler, "set_epoch", None)) or (inner is not None and _trusted(inner))


def generators_of(sampler: object) -> dict[str, torch.Generator]:
    """Those that it and the samplers within it keep in attributes, by path."""
    return {
        path + name: value
        for path, one in samplers_in(sampler).items()
        for name, value in getattr(one, "__dict__", {}).items()
        if isinstance(value, torch.Generator)
    }


def _set(states: str, own: Mapping[str, torch.Generator]) -> None:
    match_rng(RngRecord.model_validate_json(states), own).restore()


class RedrawnSampler:
    """A sampler whose orders know their position, and what they were drawn with."""

    def __init__(self, name: str, sampler: Any, own: Mapping[str, torch.Generator]) -> None:
        self._name = name
        self.sampler = sampler
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> RedrawnOrder:
        return RedrawnOrder(self._name, self.sampler, self._own)


class RedrawnOrder:
    """One order. It is begun where its first index is asked for: a loader may make two before it takes one."""

    def __init__(self, name: str, sampler: Any, own: Mapping[str, torch.Generator]) -> None:
        self._name = name
        self._sampler = sampler
        self._own = own
        self._reader = RngReader()
        self._begun = ""  # all states then; before, those that it is to begin with, where they are known
        self._indices: Iterator[Any] | None = None
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._indices is None:
            self._indices = self._begin()
        index = next(self._indices)
        self._given += 1
        return index

    def _begin(self) -> Iterator[Any]:
        states = self._reader.read(self._own)
        if self._begun and self._begun != states:  # workers had its beginning when the checkpoint was taken
            return self._drawn(1)
        self._begun = states
        return iter(self._sampler)

    def state_dict(self) -> dict[str, object]:
        """What it was drawn with, or is to be, and how much of it was given."""
        return {"begun": self._begun or self._reader.read(self._own), "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Draw it again, and go on there."""
        self._begun, self._given = state_dict["begun"], state_dict["given"]
        if self._given:
            self._indices = self._drawn(self._given)

    def _drawn(self, indices: int) -> Iterator[Any]:
        """The rest of the order as it was, so many of it drawn. Everybody's generators stay as they are."""
        now = self._reader.read({})
        _set(self._begun, self._own)
        order = iter(self._sampler)
        first = list(islice(order, indices))
        _set(now, {})
        if len(first) < self._given:
            raise InputError(f"{self._name}: its sampler ends before where the checkpoint stands; use the same data")
        return chain(first[self._given :], order)
