"""Where a Trainer's loaders stand: as of the batch that its loop was given, and with what orders are drawn."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from checkflow.errors import InputError
from checkflow.integrations._drawn import Generators


class Ahead:
    """What the loaders said before they loaded the batch that Lightning holds, where it has one its loop was not given.

    That is so where their length is unknown, to see the end. The loaders' own states have that batch behind them.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._loader: Any = None
        self._kind: type = object  # that it was of
        self._rng: Generators | None = None  # none where workers load, who have generators of their own
        self._states: list[Any] = []
        self._drawn = ""
        self._resumed = ""

    def follow(self, loader: Any) -> None:
        """From here on, this combined loader."""
        self.release()
        kind = type(loader)

        class Followed(kind):  # type: ignore[misc, valid-type]
            def __next__(followed) -> Any:
                self._note()
                return super().__next__()

        loader.__class__ = Followed  # `next` asks the class
        self._loader, self._kind = loader, kind
        own = {str(number): generator for number, generator in enumerate(generators_of(loader))}
        works = all(getattr(one, "num_workers", 0) for one in loader.flattened)
        self._rng = None if works else Generators("loader", own)

    def release(self) -> None:
        """It is as it was."""
        if self._loader is not None:
            self._loader.__class__ = self._kind
        self._loader = None

    def resume(self, drawn: str) -> None:
        """The next batch is the one that was held; it is loaded with these states of generators."""
        self._resumed = drawn

    def _note(self) -> None:
        """The combined loader is asked for a batch."""
        if self._fit_loop._data_fetcher.length is not None:
            return
        self._states = copy.deepcopy(self._loader._state_dicts())  # a dataset may give what it goes on changing
        if self._rng is not None:
            if self._resumed:
                self._rng.set(self._resumed)
            self._drawn = self._rng.read()
        self._resumed = ""

    def of_given(self, loops: dict[str, Any]) -> str:
        """Put the loaders' states into the loops' that belong to what was given, and tell those of generators."""
        if not getattr(self._fit_loop._data_fetcher, "batches", ()):
            return ""
        if "combined_loader" in loops["state_dict"]:
            loops["state_dict"]["combined_loader"] = self._states
        return self._drawn


def generators_of(loader: Any) -> list[torch.Generator]:
    """Of a combined loader's loaders and their samplers."""
    found: dict[int, torch.Generator] = {}
    for one in loader.flattened if loader is not None else ():
        samplers = (getattr(one, "sampler", None), getattr(one, "batch_sampler", None))
        for holder in (one, *samplers, getattr(samplers[1], "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def set_generators(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    """Raises InputError where there are not as many."""
    if len(generators) != len(states):
        raise InputError(
            f"train_dataloader: has {len(generators)} generators, {len(states)} in the checkpoint; use the same loaders"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class GlobalRandom:
    """The random generators that everybody draws from, as they are when this is made."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class DividedSampler:
    """A sampler of the user's whose order Lightning divides among processes: each draws all of it, and has its part.

    A StatefulDataLoader would skip what it has given of an order that it draws anew; this one draws the same again.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        own = getattr(sampler.dataset._sampler, "generator", None)
        self._rng = Generators("order", {"own": own} if isinstance(own, torch.Generator) else {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> DividedOrder:
        return DividedOrder(self._sampler, self._rng)


class DividedOrder:
    """One order of such a sampler, which knows its position."""

    def __init__(self, sampler: Any, rng: Generators) -> None:
        self._sampler = sampler
        self._rng = rng
        self._begun = rng.read()
        self._indices = iter(sampler)
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._indices)
        self._given += 1
        return index

    def state_dict(self) -> dict[str, object]:
        """What it was drawn with, and how much of it was given."""
        return {"begun": self._begun, "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Draw it again, and go on there. All generators are left as they were after it was drawn first."""
        self._begun, self._given = state_dict["begun"], state_dict["given"]
        self._rng.set(self._begun)
        self._indices = iter(self._sampler)
        for _ in range(self._given):
            next(self._indices)
