"""torch.distributed.checkpoint loads from a store: all ranks one checkpoint, whatever is saved meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save

import checkflow
from checkflow.store import alone as writing


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """torch warns that one process is no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


class Rank:
    """What torch does on a rank that loads, a step at a time."""

    def __init__(self, store: Path, state: dict[str, object], *, coordinates: bool = False) -> None:
        self.state = state
        self.reader = checkflow.StoreReader(store)
        self.planner = DefaultLoadPlanner()
        metadata = self.reader.read_metadata()
        self.planner.set_up_planner(state, metadata, coordinates)
        self.reader.set_up_storage_reader(metadata, coordinates)
        self.plan = self.reader.prepare_local_plan(self.planner.create_local_plan())

    def agree(self, other: Rank) -> list[LoadPlan]:
        """As the coordinator."""
        return self.reader.prepare_global_plan(self.planner.create_global_plan([self.plan, other.plan]))

    def read(self, plan: LoadPlan) -> dict[str, object]:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()
        return self.state


def state_of(number: int, size: int = 3) -> dict[str, object]:
    return {"w": torch.full((size,), float(number)), "n": number}


@pytest.mark.parametrize("iteration", [None, 5], ids=["the next iteration", "one that was saved before"])
def test_ranks_that_look_at_different_times_load_one_checkpoint(iteration: int | None, tmp_path: Path) -> None:
    """The coordinator's, whichever looked first."""
    for number in (1, 2):
        save(state_of(number), storage_writer=checkflow.StoreWriter(tmp_path, 5))
    early = [Rank(tmp_path, state_of(0), coordinates=True), Rank(tmp_path, state_of(0))]
    save(state_of(3), storage_writer=checkflow.StoreWriter(tmp_path, iteration))
    late = [Rank(tmp_path, state_of(0), coordinates=True), Rank(tmp_path, state_of(0))]
    newer = [rank.read(plan) for rank, plan in zip((late[0], early[1]), late[0].agree(early[1]), strict=True)]
    assert str(newer) == str([state_of(3)] * 2)
    if iteration is None:
        older = [rank.read(plan) for rank, plan in zip((early[0], late[1]), early[0].agree(late[1]), strict=True)]
        assert str(older) == str([state_of(2)] * 2)
        return
    with pytest.raises(checkflow.StoreError, match="the coordinator loads iteration 5, of which not every part"):
        late[1].read(early[0].agree(late[1])[1])


def test_what_a_rank_planned_of_another_checkpoint_is_not_read_from_one_of_other_shapes(tmp_path: Path) -> None:
    save(state_of(1), storage_writer=checkflow.StoreWriter(tmp_path))
    first = Rank(tmp_path, state_of(0), coordinates=True)
    save(state_of(2, size=4), storage_writer=checkflow.StoreWriter(tmp_path))
    second = Rank(tmp_path, state_of(0, size=4))
    with pytest.raises(checkflow.StoreError, match="was saved to while ranks looked, 'w' in another shape"):
        second.read(first.agree(second)[1])


def test_a_rank_that_does_not_see_the_coordinator_s_checkpoint_says_so(tmp_path: Path) -> None:
    """Each machine has a disk of its own, on which that of one process is another one."""
    save(state_of(1), storage_writer=checkflow.StoreWriter(tmp_path / "0", 7))
    save(state_of(2), storage_writer=checkflow.StoreWriter(tmp_path / "1", 8))
    first = Rank(tmp_path / "0", state_of(0), coordinates=True)
    second = Rank(tmp_path / "1", state_of(0))
    with pytest.raises(checkflow.StoreError, match=r"loads iteration 7, .*or give every rank the same store"):
        second.read(first.agree(second)[1])


def no_store(store: Path) -> str:
    assert not store.exists()
    return "has no such checkpoint that every rank has"


def an_index_that_is_wrong(store: Path) -> str:
    forged_rank = '"epoch":0'
    save({"epoch": 1}, storage_writer=checkflow.StoreWriter(store))
    (before,) = store.glob("0*")
    record = (before / "commit.json").read_text()
    assert record.count(forged_rank) == 1
    writing.publish(writing.begin(store, [], print), 1, record.replace(forged_rank, '"epoch":3').encode(), {}, print)
    return "its index names a rank that it does not have"


def a_file(store: Path) -> str:
    store.write_text("")
    return "is no store that can be read"


@pytest.mark.parametrize("make", [no_store, an_index_that_is_wrong, a_file])
def test_what_cannot_be_loaded_is_told_as_it_is(make: Callable[[Path], str], tmp_path: Path) -> None:
    """By load, and to who reads the metadata without it."""
    why = make(tmp_path / "store")
    with pytest.raises(CheckpointException) as found:
        load({"epoch": 0}, storage_reader=checkflow.StoreReader(tmp_path / "store"))
    ((error, _),) = found.value.failures.values()
    assert isinstance(error, checkflow.StoreError) and why in str(error) and "\n" not in str(error)
    with pytest.raises(CheckpointException, match=why):
        _load_state_dict_from_keys(storage_reader=checkflow.StoreReader(tmp_path / "store"))
    metadata = checkflow.StoreReader(tmp_path / "store").read_metadata()
    for field in ("state_dict_metadata", "storage_meta", "planner_data"):
        with pytest.raises(checkflow.StoreError, match=why):
            getattr(metadata, field)
