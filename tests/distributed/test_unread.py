"""What ranks have that is newer than what is restored, and cannot be read: it is named or refused, and never silent."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from job_of_ranks import Job
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

import checkflow
from checkflow.distributed.marks import Mark
from checkflow.distributed.parts import newest_mark
from checkflow.errors import FormatError
from checkflow.store import alone
from checkflow.store.format.begun import NewFile

FILES = pytest.mark.parametrize("name", ["commit.json", "manifest.json"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@FILES
def test_a_rank_that_cannot_read_its_newest_part_says_so(name: str, tmp_path: Path) -> None:
    """And so do the others, which have theirs; without any whole one it is refused."""
    with Job(2, "ddp", tmp_path, 3, 0, "persist_every=1", "when_full=wait") as job:
        job.done()
    flip(next((tmp_path / "rank-1-of-2").glob("*-iteration-3")) / name)
    with Job(2, "ddp", tmp_path, 3, 0) as job:
        assert {resumed for resumed, _ in job.done().values()} == {2}
        assert any("iteration-3: rank-1-of-2: " in line for line in job.errors[0])
    for rank in (0, 1):
        for path in (tmp_path / f"rank-{rank}-of-2").glob(f"*/{name}"):
            flip(path)
    with Job(2, "ddp", tmp_path, 3, 0) as job:
        assert set(job.wait().values()) == {1}
        assert all("no checkpoint verifies on every rank" in said[-1] for said in job.errors.values())


def trained(store: Path, iterations: int) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = checkflow.PersistEvery(iterations=1)
    with checkflow.attach(model, optimizer, store=store, persist_every=every, when_full="wait") as checkpointer:
        for _ in range(iterations):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            checkpointer.step()
    return model


def loaded(store: Path, iteration: int | None = None) -> torch.Tensor:
    state = {"model": torch.nn.Linear(2, 1).state_dict()}
    with warnings.catch_warnings(action="ignore"):  # that one process alone is no group
        load(state, storage_reader=checkflow.StoreReader(store, iteration))
    found: torch.Tensor = state["model"]["weight"]
    return found


@FILES
def test_a_reader_refuses_what_is_newest_and_cannot_be_read(name: str, tmp_path: Path) -> None:
    model = trained(tmp_path, 2)
    assert torch.equal(loaded(tmp_path), model.weight)
    flip(next(tmp_path.glob("*-iteration-2")) / name)
    with pytest.raises(
        CheckpointException, match=r"00000002-iteration-2: .*; give StoreReader the iteration of an older"
    ):
        loaded(tmp_path)
    assert not torch.equal(loaded(tmp_path, 1), model.weight)
    assert newest_mark(tmp_path) == Mark(0, 2)


def test_a_reader_refuses_a_record_of_a_later_version(tmp_path: Path) -> None:
    """What is newest is known to another version only."""
    trained(tmp_path, 2)
    record = json.loads((next(tmp_path.glob("*-iteration-2")) / "commit.json").read_text())
    later = json.dumps(record | {"iteration": 3, "version": record["version"] + 1}).encode()
    data = memoryview(bytearray((next(tmp_path.glob("*-iteration-2")) / "model.safetensors").read_bytes()))
    begun = alone.begin(tmp_path, [NewFile("model.safetensors", len(data), [data])], print)
    alone.publish(begun, 3, later, {}, print)
    with pytest.raises(CheckpointException, match="version 2 is not supported"):
        loaded(tmp_path)
    with pytest.raises(FormatError, match=r"iteration-3: commit\.json: version 2 is not supported"):
        newest_mark(tmp_path)
