"""Several saves of one process: one beside another, and with planners that send only what has changed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest
import torch
from saving import checkpoints, loaded, refused, saved
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

import checkflow


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """torch warns that one process is no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


class Caching(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


class CachingToo(Caching):
    """Which keeps its plans apart."""


@pytest.fixture
def nothing_cached() -> Iterator[None]:
    """Planners keep plans for as long as their process lives."""
    kept = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached")]
    before = [dict(each) for each in kept]
    for each in kept:
        each.clear()
    yield
    for each, was in zip(kept, before, strict=True):
        each.clear()
        each.update(was)


@pytest.mark.usefixtures("nothing_cached")
def test_a_planner_that_sends_only_what_changed(tmp_path: Path) -> None:
    """Each save has all of it, by whichever writer."""
    writer = checkflow.StoreWriter(tmp_path)
    for number in range(4):
        state = {"a": torch.full((2,), float(number)), **({"b": number} if number > 1 else {})}
        save(state, storage_writer=writer, planner=Caching())
    assert checkpoints(tmp_path)[-1] == "00000004-iteration-4"
    found = loaded(tmp_path, {"a": torch.zeros(2), "b": 0})
    assert repr(found) == repr({"a": torch.full((2,), 3.0), "b": 3})
    saved(tmp_path, state | {"b": 4}, planner=Caching())
    assert loaded(tmp_path, {"b": 0}) == {"b": 4}


@pytest.mark.usefixtures("nothing_cached")
def test_writers_take_turns_with_a_planner_that_caches(tmp_path: Path) -> None:
    """What has not changed is what it saved last, to wherever."""
    writers = {name: checkflow.StoreWriter(tmp_path / name) for name in "ab"}
    for number, (name, key) in enumerate([("a", "x"), ("b", "y"), ("a", "y"), ("a", "y"), ("a", "x"), ("b", "x")]):
        state = {key: torch.full((2,), float(number)), f"of {key}": number}
        save(state, storage_writer=writers[name], planner=Caching())
        found = loaded(tmp_path / name, {key: torch.zeros(2), f"of {key}": -1})
        assert repr(found) == repr(state)


@pytest.mark.usefixtures("nothing_cached")
def test_of_several_planners_that_cache_each_has_its_store(tmp_path: Path) -> None:
    """And where it is not known which it is, it is refused: nothing stale is saved."""
    stores = {Caching: tmp_path / "a", CachingToo: tmp_path / "b"}
    for number in range(3):
        for planner, store in stores.items():
            saved(store, {store.name: number}, planner=planner())
            assert loaded(store, {store.name: -1}) == {store.name: number}
    advice = "another planner of this process has such, too; use enable_plan_caching=False"
    assert advice in str(refused(tmp_path / "c", {"a": 4}, planner=Caching()))
    assert advice in str(refused(tmp_path / "b", {"a": 4}, planner=Caching()))
    assert loaded(tmp_path / "b", {"b": -1}) == {"b": 2}


class Stopped(DefaultSavePlanner):
    """Waits at a step until it is told to go on."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step, self.reached, self.go_on = step, Event(), Event()

    def at(self, step: str) -> None:
        if step == self.step:
            self.reached.set()
            assert self.go_on.wait(60)

    def create_local_plan(self) -> SavePlan:
        self.at("planned")
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.at("marked")
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> object:
        self.at("asked for")
        return super().lookup_object(index)


@pytest.mark.parametrize("iteration", [None, 340])
@pytest.mark.parametrize("step", ["planned", "marked", "asked for", "begun"])
def test_saves_with_one_writer_that_overlap(step: str, iteration: int | None, tmp_path: Path) -> None:
    """Each is a checkpoint of its own, with what it was given, whichever ends first."""
    writer = checkflow.StoreWriter(tmp_path, iteration)
    planner = Stopped(step)
    finish = writer.finish

    def finished(metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            planner.at("begun")
        finish(metadata, results)

    writer.finish = finished  # type: ignore[method-assign]
    states: list[dict[str, object]] = [{"w": torch.full((3,), float(number)), "n": number} for number in range(2)]
    first = async_save(states[0], storage_writer=writer, planner=planner)
    assert isinstance(first, Future) and planner.reached.wait(60)
    save(states[1], storage_writer=writer)
    planner.go_on.set()
    first.result()
    iterations = {int(name.split("-")[-1]) for name in checkpoints(tmp_path)}
    assert len(iterations) == 2 and (iteration or 1) in iterations
    found = [loaded(tmp_path, {"w": torch.zeros(3), "n": -1}, each) for each in sorted(iterations)]
    assert sorted(map(repr, found)) == sorted(map(repr, states))
    assert not list(tmp_path.glob(".*"))
