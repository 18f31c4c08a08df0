"""Samplers that are told epochs: a pass is resumed in the order of its own epoch, however the script tells it."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from resume_memory import Saved, load, save
from torch import nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from checkflow.data import ResumableLoader
from checkflow.state.host.objects import HostObjects
from checkflow.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
ITEMS, EPOCHS = 22, 3  # an epoch of three batches of this rank's
BATCHES = 3 * EPOCHS


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Numbers):
    """Has a state of its own."""

    seen = 0

    def __getitem__(self, index: int) -> int:
        self.seen += 1
        return index

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.seen = state_dict["seen"]


class Nameless(Sampler[int]):
    """Keeps its epoch where nobody looks."""

    def __init__(self) -> None:
        self._told = 0

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11, generator=torch.Generator().manual_seed(self._told)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch


class Around(Sampler[int]):
    """Says nothing of the epoch of what it takes its order from."""

    def __init__(self, base: Sampler[int]) -> None:
        self.base = base

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.base))


class Batches(BatchSampler):
    """Hands the epoch on."""

    def set_epoch(self, epoch: int) -> None:
        assert isinstance(self.sampler, DistributedSampler)
        self.sampler.set_epoch(epoch)


KINDS = ("distributed", "stateful", "counting", "nameless", "around", "batches", "handed on", "checkflow's")


class Script:
    """Takes passes; what it was given is in `batches`."""

    def __init__(self, kind: str, workers: int, persistent: bool = False) -> None:
        torch.manual_seed(5)
        data = Counting() if kind == "counting" else Numbers()
        sampler: Any = StatefulDistributedSampler(data, 2, 0, seed=3) if kind == "stateful" else None
        sampler = Nameless() if kind == "nameless" else sampler or DistributedSampler(data, 2, 0, seed=3)
        self.told = sampler
        given: dict[str, Any] = {"batch_size": 4, "sampler": Around(sampler) if kind == "around" else sampler}
        if kind in ("batches", "handed on", "checkflow's"):
            given = {"batch_sampler": (Batches if kind == "handed on" else BatchSampler)(sampler, 4, False)}
        self.told = given["batch_sampler"] if kind == "handed on" else sampler
        self.loader: Any = (
            ResumableLoader(data, num_workers=workers, persistent_workers=persistent, **given)
            if kind == "checkflow's"
            else StatefulDataLoader(data, num_workers=workers, persistent_workers=persistent, **given)
        )
        self.training = Training(nn.Linear(1, 1), [], lambda: None)
        self.objects = HostObjects.of(loader=self.loader)
        self.batches: list[list[int]] = []
        save(self.training, self.objects, 0)  # attach reads everything once

    def go(self, epoch: int, batches: int, first: int = 0, tells: bool = True) -> tuple[Saved, int]:
        """From that epoch on, each numbered by `first` more; `tells`: the first of them, too."""
        while batches:
            if tells:
                self.told.set_epoch(first + epoch)
            tells = True
            for batch in self.loader:
                self.batches.append(batch.tolist())
                batches -= 1
                if not batches:
                    return save(self.training, self.objects, len(self.batches)), epoch
            epoch += 1
        raise AssertionError

    def end(self) -> None:
        if isinstance(self.loader, StatefulDataLoader):
            self.loader.load_state_dict({})
        gc.collect()


def alone(kind: str, first: int) -> list[list[int]]:
    """What the sampler says, with no loader."""
    script = Script(kind, 0)
    found: list[list[int]] = []
    for epoch in range(EPOCHS):
        script.told.set_epoch(first + epoch)
        order = script.loader.batch_sampler if isinstance(script.loader, StatefulDataLoader) else None
        indices = list(script.told) if order is None else [index for batch in order for index in batch]
        found += [indices[at : at + 4] for at in range(0, len(indices), 4)]
    return found


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_resumed_in_its_own_epochs_order(kind: str, first: int, tells: bool) -> None:
    """At each batch of three epochs, the last of each among them; the first epoch may have any number."""
    expected = alone(kind, first)
    for at in range(1, BATCHES):
        before, after = Script(kind, 0), Script(kind, 0)
        saved, epoch = before.go(0, at, first)
        load(saved, after.training, after.objects)
        after.go(epoch, BATCHES - at, first, tells)
        assert before.batches + after.batches == expected, at


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(
    ("kind", "persistent"),
    [("distributed", False), ("distributed", True), ("stateful", False), ("counting", True), ("nameless", False),
     ("batches", True), ("checkflow's", True)],
)  # fmt: skip
@pytest.mark.parametrize("at", [1, 5, 6])
def test_with_workers_that_fetch_ahead(kind: str, persistent: bool, at: int, tells: bool) -> None:
    before = Script(kind, 2, persistent)
    saved, epoch = before.go(0, at, 7)
    before.end()
    after = Script(kind, 2, persistent)
    load(saved, after.training, after.objects)
    after.go(epoch, BATCHES - at, 7, tells)
    after.end()
    assert before.batches + after.batches == alone(kind, 7)


@pytest.mark.parametrize("kind", ["distributed", "counting"])
def test_a_pass_that_has_not_begun_is_of_the_epoch_that_is_told_then(kind: str) -> None:
    """Also after a restore, and one that nobody tells is of the epoch that it had. Nothing is drawn by looking."""
    before = Script(kind, 2)
    before.go(0, 2, 7)
    before.loader.load_state_dict({})  # the pass was left
    generator = torch.get_rng_state().tolist()
    saved = save(before.training, before.objects, 2)
    assert torch.get_rng_state().tolist() == generator
    before.end()
    for tells in (True, False):
        after = Script(kind, 2)
        load(saved, after.training, after.objects)
        after.go(1 if tells else 0, 3, 7, tells)
        after.end()
        assert after.batches == (alone(kind, 7)[3:6] if tells else alone(kind, 7)[:3])


def test_a_sampler_that_says_what_it_was_told_is_as_it_was_otherwise() -> None:
    """It can be pickled, by itself and with what it was told."""
    script = Script("nameless", 0)
    script.go(0, 1, 7)
    again = pickle.loads(pickle.dumps(script.told))
    assert list(again) == list(script.told)
    again.set_epoch(1)
    assert list(again) != list(script.told)
