"""A pass over a loader that goes on as training does, and whose position nobody saves, is named; no other is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attach_learning import Loop, attached
from test_forgotten import Draws
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.learning import forgotten

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
LACKING = "its position is in no checkpoint"
DATA = TensorDataset(torch.zeros(64, 1))


class Order(Sampler[int]):
    """Knows its position itself."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        while self.given < 64:
            self.given += 1
            yield self.given - 1

    def state_dict(self) -> dict[str, object]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Stream(IterableDataset[torch.Tensor]):
    """The same of a data set."""

    def __init__(self) -> None:
        self.order = Order()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.zeros(1) for _ in self.order)

    def state_dict(self) -> dict[str, object]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)


@pytest.fixture(autouse=True)
def _looks_whenever_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_SHARE", 1e9)


def train(loop: Loop, ckpt: Checkpointer, loader: DataLoader[Any], iterations: int = 12) -> None:
    done = 0
    while done < iterations:
        for _ in loader:
            loop.iterate(done)
            ckpt.step()
            done += 1
            if done == iterations:
                break


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 32, None])
def test_a_plain_loader_is_named_once(tmp_path: Path, is_learned: bool, batch_size: int | None) -> None:
    """Also where its epochs have two batches, where it makes none, and where a schedule is given."""
    options: dict[str, Any] = {}
    if not is_learned:
        with attached(loop := Loop(), tmp_path / "first") as ckpt:
            train(loop, ckpt, DataLoader(DATA), 2)
            options["schedule"] = ckpt.schedule
    loop, told = Loop(), list[str]()
    loader = DataLoader(DATA, batch_size, shuffle=batch_size is not None)
    with attached(loop, tmp_path / "store", told, **options) as ckpt:
        train(loop, ckpt, loader)
    (line,) = [line for line in told if LACKING in line]
    assert line.rpartition("store: ")[2].startswith("loader (DataLoader): its pass goes on as training does"), line
    assert line.endswith("give a checkflow.ResumableLoader or torchdata's StatefulDataLoader: attach(loader=...)")


def test_one_that_could_be_given_is_to_be(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:
        train(loop, ckpt, StatefulDataLoader(DATA))
    (line,) = [line for line in told if LACKING in line]
    assert line.endswith("unless your loop finds its batch again, give it: attach(loader=...)")


@pytest.mark.parametrize(
    ("make", "workers"), [(checkflow.ResumableLoader, 0), (checkflow.ResumableLoader, 1), (StatefulDataLoader, 0)]
)
def test_one_that_is_given_is_not_named(tmp_path: Path, make: Callable[..., Any], workers: int) -> None:
    loop, told = Loop(), list[str]()
    loader = make(DATA, batch_size=4, num_workers=workers)
    with attached(loop, tmp_path / "store", told, loader=loader) as ckpt:
        train(loop, ckpt, loader)
    assert not [line for line in told if LACKING in line]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "dataset", "around"])
def test_one_whose_position_is_given_otherwise_is_not_named(tmp_path: Path, kind: str) -> None:
    loop, told, order, stream = Loop(), list[str](), Order(), Stream()
    data: Dataset[Any] = DATA
    loaders: dict[str, Callable[[], DataLoader[Any]]] = {
        "sampler": lambda: DataLoader(data, sampler=order),
        "batch_sampler": lambda: DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(order, 2, True)),
        "dataset": lambda: DataLoader(stream),
        "around": lambda: DataLoader(data, 2),
    }
    loader = loaders[kind]()
    given = {"dataset": stream, "around": Draws(loader)}.get(kind, order)
    with attached(loop, tmp_path / "store", told, extra={"position": given}) as ckpt:
        train(loop, ckpt, loader)
    assert not [line for line in told if LACKING in line]


def test_one_that_iterations_begin_anew_or_leave_alone_is_not_named(tmp_path: Path) -> None:
    """As the loader of an evaluation, and a batch that is trained on again and again."""
    loop, told = Loop(), list[str]()
    evaluation, first = DataLoader(DATA, 16), DataLoader(DATA, 16)
    passes = iter(first)
    fixed = next(passes)
    with attached(loop, tmp_path / "store", told) as ckpt:
        for number in range(12):
            loop.iterate(number)
            assert len(list(evaluation)) == 4 and fixed
            ckpt.step()
    assert not [line for line in told if LACKING in line]


class Shuffled(checkflow.ResumableLoader[Any]):
    """A script's own."""


class Around:
    """One that is given by the two methods alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.inner = DataLoader(*arguments, **options)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    state_dict, load_state_dict = Draws.state_dict, Draws.load_state_dict


ACCEPTED: dict[str, Callable[..., Any]] = {
    "ResumableLoader": checkflow.ResumableLoader,
    "Shuffled": Shuffled,
    "StatefulDataLoader": StatefulDataLoader,
    "DataLoader": Around,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ACCEPTED)
def test_each_kind_that_is_accepted_is_named_where_it_is_not_given(tmp_path: Path, kind: str, workers: int) -> None:
    loop, told = Loop(), list[str]()
    loader = ACCEPTED[kind](DATA, batch_size=4, num_workers=workers)
    with attached(Loop(), tmp_path / "given", loader=loader):
        pass  # it is accepted
    with attached(loop, tmp_path / "store", told) as ckpt:
        train(loop, ckpt, loader)
    (line,) = [line for line in told if LACKING in line]
    name = "loader.inner" if kind == "DataLoader" else "loader"
    assert f"store: {name} ({kind}): its pass goes on as training does" in line
    del loader
    gc.collect()  # what refers to itself has workers until then


@pytest.mark.parametrize(
    ("kind", "has_name"), [("ResumableLoader", True), ("ResumableLoader", False), ("StatefulDataLoader", True)]
)
def test_one_that_takes_the_place_of_the_one_that_was_given_is_named(tmp_path: Path, kind: str, has_name: bool) -> None:
    """As where each epoch makes its own, of another batch size."""
    loop, told = Loop(), list[str]()
    loader = ACCEPTED[kind](DATA, batch_size=16)
    with attached(loop, tmp_path / "store", told, loader=loader) as ckpt:
        train(loop, ckpt, loader, 4)
        assert not [line for line in told if LACKING in line]
        if has_name:
            loader = ACCEPTED[kind](DATA, batch_size=2)
        for _ in loader if has_name else ACCEPTED[kind](DATA, batch_size=2):
            loop.iterate(0)
            ckpt.step()
    (line,) = [line for line in told if LACKING in line]
    assert f"store: {'loader' if has_name else 'a loader that no name leads to'} ({kind}): its pass goes on" in line


def test_ones_of_ours_that_are_evaluated_with_are_not_named(tmp_path: Path) -> None:
    """Whole passes within an iteration, whatever is left of the last; nor one that another object gives."""
    loop, told = Loop(), list[str]()
    evaluation, begun = (checkflow.ResumableLoader(DATA, batch_size=16) for _ in range(2))
    inner = checkflow.ResumableLoader(DATA, batch_size=2)
    assert next(iter(begun)) is not None
    with attached(loop, tmp_path / "store", told, extra={"position": Draws(inner)}) as ckpt:
        for number, _ in enumerate(inner):
            loop.iterate(number)
            assert len(list(evaluation)) == 4
            ckpt.step()
    assert not [line for line in told if LACKING in line]
