"""A plain DataLoader whose position can be saved: seeded, each item exactly once an epoch, also across a resume.

    loader = ResumableLoader(dataset, batch_size=32, shuffle=True, seed=0, num_workers=2)
    with checkflow.attach(model, optimizer, loader=loader, ...) as ckpt:
        ckpt.restore()
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...
                ckpt.step()

The order of an epoch is a function of seed and epoch alone. What counts is what the loop was given, not what workers
fetched ahead. Nothing is drawn from the global random generators in the training process.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import BaseContext
from numbers import Integral
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from checkflow.epochs import epochs_of, note_epochs, tell_epochs, told_in
from checkflow.errors import InputError, shown
from checkflow.given import FLAG, Kind, check_kinds
from checkflow.text import brief
from checkflow.units import seconds_to_wait, whole_number

item = TypeVar("item", covariant=True)
_UNSEEDED = tuple(each.__iter__ for each in (RandomSampler, WeightedRandomSampler, SubsetRandomSampler))
_FUNCTION = Kind((Callable,), "a function", may_be_none=True)  # type: ignore[arg-type]
_KINDS = {
    "loader: shuffle": FLAG,
    "loader: drop_last": FLAG,
    "loader: pin_memory": FLAG,
    "loader: persistent_workers": FLAG,
    "loader: collate_fn": _FUNCTION,
    "loader: worker_init_fn": _FUNCTION,
    "loader: batch_sampler": Kind((Iterable,), "batches of indices", may_be_none=True),
    "loader: prefetch_factor": Kind((Integral,), "a whole number", may_be_none=True),
    "loader: multiprocessing_context": Kind((str, BaseContext), "a context, or its name", may_be_none=True),
}
_COMPARED = 64  # batches of two passes
_IN_PLACE = {  # arguments of DataLoader's
    "sampler": "sampler is not taken; give a torch.utils.data.Subset of the dataset (for a rank: its part), a "
    "batch_sampler, or attach torchdata's StatefulDataLoader",
    "generator": "generator is not taken; give a seed, which each epoch's order is made of",
    "in_order": "in_order is not taken; batches come in their order, which the position is counted in",
}


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch's indices, and where it stands: workers seed themselves by that."""

    epoch: int
    first: int  # items of the epoch before it
    indices: tuple[int, ...]


class ResumableLoader(Generic[item]):
    """Iterates like a DataLoader over a map-style dataset, and has state_dict and load_state_dict.

    A pass that was left early (break, or a restored checkpoint) is continued by the next `for`; a pass that ended
    raises `epoch` by one. One that was left at its last batch, as by zip, has ended, too: the next `for` begins the
    next epoch. Only a checkpoint taken after an epoch's last batch resumes with a pass of no batches, so that what the
    user does at the end of an epoch is done.

    With workers, each seeds Python's, NumPy's and torch's generators before each batch by seed, epoch and position, so
    random augmentations do not depend on who fetched what. Without, they draw from the training's own generators.

    Args:
        dataset: map-style, with a length that does not change.
        batch_size: items in a batch; the last one of an epoch may be smaller. May differ after a restore.
        shuffle: a new order each epoch, else the dataset's.
        seed: of the orders and of the workers.
        drop_last: leave out the last batch of an epoch where it is smaller.
        batch_sampler: batches of indices in place of the four above. Has to give the same batches each time, or, if it
            has set_epoch, the same for the same epoch.
        num_workers: of this and what follows the meaning is that of torch.utils.data.DataLoader.
        others: none. DataLoader's other arguments are refused with what to give in their place.

    Raises:
        InputError: a dataset or a sampler that cannot be resumed, or another argument.
    """

    def __init__(
        self,
        dataset: Dataset[item],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        batch_sampler: Sequence[Sequence[int]] | torch.utils.data.Sampler[list[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[item]], object] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        **others: NoReturn,
    ) -> None:
        for name in others:
            raise InputError(
                f"loader: {_IN_PLACE.get(name, f'{name!r:.40} is no argument of ResumableLoader; see its help')}"
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InputError("loader: an iterable dataset has no positions; use torchdata's StatefulDataLoader")
        check_kinds(_KINDS, {f"loader: {name}": value for name, value in locals().items()})
        batch_size = whole_number(batch_size, "loader: batch_size", "give at least 1")
        seed = whole_number(seed, "loader: seed", "give 0 or more")
        num_workers = whole_number(num_workers, "loader: num_workers", "give 0 or more")
        timeout = seconds_to_wait(timeout, "loader: timeout", "give a number of seconds, 0 for no limit")
        if timeout and not num_workers:
            raise InputError("loader: timeout is how long a worker is waited for, and there is none; give num_workers")
        if batch_size < 1 or seed < 0:
            raise InputError(f"loader: batch_size {batch_size} or seed {seed} is out of range; give at least 1 and 0")
        _refuse_unseeded(batch_sampler)
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        try:
            self._size = len(cast(Sized, dataset))
        except TypeError as error:  # a tensor of no dimensions
            raise InputError(f"loader: dataset: {brief(error)}; give one that has items") from None
        self._batches = _Batches(self._size, batch_size, shuffle, seed, drop_last, batch_sampler)
        self._generator = torch.Generator()
        self._items = 0  # of the current epoch that the loop was given
        self._told = {path: one for path, one in told_in(batch_sampler).items() if path}  # the first it tells itself
        note_epochs(self._told)
        self._pass = 0  # number of the pass that may go on
        self._loaded = False  # the position is a checkpoint's, and no pass was begun there yet
        try:
            self._loader: DataLoader[item] = DataLoader(
                _Seeded(dataset, seed),
                batch_sampler=cast(torch.utils.data.Sampler[list[int]], self._batches),
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
                timeout=timeout,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                generator=self._generator,
            )
        except (ValueError, TypeError) as error:  # what does not go together, by torch's own rules
            raise InputError(f"loader: {brief(error)}; correct the arguments") from None

    @property
    def epoch(self) -> int:
        """The number of the pass that goes on or comes next, from 0."""
        return self._batches.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next `for`. The current one goes on where it is."""
        if epoch != self.epoch:
            self._move(epoch, 0)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[item]:
        _begun.add(self)
        loaded, self._loaded = self._loaded, False  # also where nobody asks for the first batch, as zip may not
        return self._pass_from_here(loaded)

    def _pass_from_here(self, loaded: bool) -> Iterator[item]:
        if self._items and not loaded and not self._batches.goes_on(self.epoch, self._items):
            self._move(self.epoch + 1, 0)  # it was left at its last batch
        self._pass += 1
        number = self._pass
        self._batches.start = self._items
        self._generator.manual_seed(_mixed(self.seed, self.epoch))  # for the DataLoader's own seed, drawn in iter()
        sizes = self._batches.sizes = deque()
        for batch in self._loader:
            self._check_current(number)
            self._items += sizes.popleft()
            yield batch
            self._check_current(number)
        self._move(self.epoch + 1, 0)

    def _check_current(self, number: int) -> None:
        if number != self._pass:
            raise InputError("loader: was moved or iterated anew during this pass; use one pass at a time")

    def _move(self, epoch: int, items: int) -> None:
        self._pass += 1
        self._loaded = False
        self._batches.epoch, self._items = epoch, items

    def state_dict(self) -> dict[str, object]:
        """The position after the last batch that the loop was given."""
        return self._position() | ({"told": epochs_of(self._told)} if self._told else {})

    def _position(self) -> dict[str, object]:
        return {
            "epoch": self.epoch,
            "items": self._items,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": self._size,
        }

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue there. Raises InputError where that is no position in this dataset's order."""
        for key, ours in self._position().items():
            theirs = state_dict.get(key)
            if type(theirs) is not type(ours):
                raise InputError(f"loader: the state's {key!r} is {theirs!r:.40}; give what state_dict() gave")
            if key in ("seed", "shuffle", "size") and theirs != ours:
                raise InputError(f"loader: {key} is {ours}, {theirs} in the checkpoint; use the same data and order")
        epoch, items = state_dict["epoch"], state_dict["items"]
        assert isinstance(epoch, int) and isinstance(items, int)
        tell_epochs(self._told, cast(dict[str, int], state_dict.get("told", {})))
        self._batches.check(epoch, items)
        self._move(epoch, items)
        self._loaded = True


_begun: weakref.WeakSet[ResumableLoader[Any]] = weakref.WeakSet()


def begun_loaders() -> list[ResumableLoader[Any]]:
    """Those that were iterated in this process and are there."""
    return list(_begun)


class _Batches:
    """A DataLoader's batch sampler: the batches of `epoch` from item `start` on. Says how large each one was."""

    def __init__(
        self,
        size: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        given: Sequence[Sequence[int]] | torch.utils.data.Sampler[list[int]] | None,
    ) -> None:
        self.epoch = 0
        self.start = 0
        self.sizes: deque[int] = deque()
        self._size = size
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._given = given

    def __len__(self) -> int:
        if self._given is not None:
            return len(cast(Sized, self._given))
        return self._size // self._batch_size if self._drop_last else -(-self._size // self._batch_size)

    def __iter__(self) -> Iterator[_Batch]:
        first, sizes = self.start, self.sizes
        for indices in self._rest(self.epoch, first):
            sizes.append(len(indices))
            yield _Batch(self.epoch, first, tuple(indices))
            first += len(indices)

    def check(self, epoch: int, items: int) -> None:
        """Raises InputError unless a batch begins after so many items."""
        if epoch < 0 or items < 0 or (self._given is None and items > self._size):
            raise InputError(f"loader: epoch {epoch}, item {items} is no position; the dataset has {self._size} items")
        if self._given is not None:
            next(self._rest(epoch, items), None)

    def goes_on(self, epoch: int, items: int) -> bool:
        """Whether a batch follows after so many items."""
        if self._given is None:  # without drawing an order
            return self._size - items >= (self._batch_size if self._drop_last else 1)
        return next(self._rest(epoch, items), None) is not None

    def _rest(self, epoch: int, start: int) -> Iterator[Sequence[int]]:
        if self._given is None:
            yield from self._seeded(epoch, start)
            return
        set_epoch = getattr(self._given, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        passed = 0
        for indices in self._given:
            if passed > start:
                break
            if passed == start:
                yield indices
                start += len(indices)
            passed += len(indices)
        if passed != start:
            raise InputError(
                f"loader: no batch begins after {start} items of epoch {epoch}; use the same batch_sampler"
            )

    def _seeded(self, epoch: int, start: int) -> Iterator[Sequence[int]]:
        order: Sequence[int] | torch.Tensor = range(self._size)
        if self._shuffle:
            generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
            order = torch.randperm(self._size, generator=generator)
        for low in range(start, self._size, self._batch_size):
            indices = order[low : low + self._batch_size]
            if len(indices) == self._batch_size or not self._drop_last:
                yield indices.tolist() if isinstance(indices, torch.Tensor) else indices


class _Seeded(Dataset[item]):
    """The dataset; in a worker, its random generators are a function of seed, epoch and position."""

    def __init__(self, dataset: Dataset[item], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, batch: _Batch) -> list[item]:
        """What DataLoader's fetcher calls, with what the batch sampler gave."""
        if get_worker_info() is not None:
            mixed = _mixed(self._seed, batch.epoch, batch.first)
            random.seed(mixed)
            np.random.seed(mixed % 2**32)
            torch.default_generator.manual_seed(mixed)
        whole = getattr(self._dataset, "__getitems__", None)
        if whole is not None:
            return cast(list[item], whole(list(batch.indices)))
        return [self._dataset[index] for index in batch.indices]


def _mixed(*numbers: int) -> int:
    """A seed of 63 bits from numbers that may be alike (np.random.SeedSequence)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _indices_in(batch: Any) -> list[int]:
    """Raises InputError for what has none."""
    try:
        indices = None if isinstance(batch, str) else iter(batch)
    except TypeError:  # a tensor of no dimensions is of an iterable type
        indices = None
    if indices is None:
        raise InputError(f"loader: batch_sampler: a batch of it is {shown(batch)}; give batches of indices")
    return list(indices)


def _refuse_unseeded(batch_sampler: Any) -> None:
    """Its first batches are asked for twice. The global generators are left as they were."""
    if batch_sampler is None:
        return
    if isinstance(batch_sampler, (str, bytes)):
        raise InputError(f"loader: batch_sampler: is {shown(batch_sampler)}; give batches of indices")
    set_epoch = getattr(batch_sampler, "set_epoch", None)
    inner = getattr(batch_sampler, "sampler", batch_sampler)
    unseeded = set_epoch is None and getattr(type(inner), "__iter__", None) in _UNSEEDED  # two of its orders may agree
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    passes: list[list[list[int]]] = []
    for _ in range(0 if unseeded else 2):
        if set_epoch is not None:
            set_epoch(0)
        passes.append([_indices_in(batch) for batch in islice(batch_sampler, _COMPARED)])
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    if unseeded or passes[0] != passes[1]:
        raise InputError(
            f"loader: a {type(inner).__name__} gives another order each time; use shuffle=True and a seed, or a "
            "sampler with set_epoch"
        )
