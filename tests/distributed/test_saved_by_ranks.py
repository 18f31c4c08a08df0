"""torch.distributed.checkpoint saves to a store from several ranks: all of it counts, or none."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from job_of_ranks import Job
from torch.distributed.checkpoint.state_dict_loader import load

import checkflow
from checkflow.cli import run

RANK = Path(__file__).parent / "rank_to_save.py"


def loaded(store: Path, state: dict[str, object], iteration: int | None = None) -> dict[str, object]:
    """By one process."""
    with warnings.catch_warnings(action="ignore"):  # that one process alone is no group
        load(state, storage_reader=checkflow.StoreReader(store, iteration))
    return state


def listed(store: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, list[int]]]:
    capsys.readouterr()
    assert run(["list", str(store), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    return [(each["iteration"], each["ranks"]) for each in found]


@pytest.mark.parametrize(("kind", "size"), [("fsdp", 2), ("hsdp", 4), ("tp", 2), ("ddp", 2)])
def test_what_ranks_save_they_load(kind: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one process loads it, and the commands know it."""
    store = tmp_path / "store"
    with Job(size, kind, store, 2, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
        assert all(said == ["saved 1", "saved 2", "loaded 2 True"] for said in job.said.values())
    assert listed(store, capsys) == [(11, list(range(size))), (10, list(range(size)))]
    assert run(["check", str(store)]) == 0
    states = {f"of {rank}": {"number": 0, "tensor": torch.zeros(rank + 1), "names": None} for rank in range(size)}
    model = {"2.bias": torch.zeros(6), "0.weight": torch.zeros(24, 16)}
    found = loaded(store, {**states, "model": model, "kind": ""})
    assert found["kind"] == kind
    for rank in range(size):
        own = found[f"of {rank}"]
        assert own == {"number": 200 + rank, "tensor": own["tensor"], "names": ("é", {1: b"\0"})}  # type: ignore[index]
        assert own["tensor"].tolist() == [2.0] * (rank + 1)
    before = loaded(store, {"of 1": {"number": 0}}, 10)
    assert before == {"of 1": {"number": 101}}
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "whole.pt")]) == 0
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole["state"]["model.0.weight"], model["0.weight"])
    assert json.loads(whole["commit"])["state_dict"]["values"]["kind"] == kind
    part = next((store / f"rank-1-of-{size}").glob("*-iteration-11")) / "state.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    with pytest.raises(BaseException, match=r"state.safetensors: bytes 0 to \d+ are not what was written"):
        loaded(store, {f"of {rank}": state for rank, state in enumerate(states.values())} | states | {"model": model})
    assert loaded(store, {"kind": ""}, 10) == {"kind": kind}


@pytest.mark.parametrize(("way", "size"), [("die", 2), ("die", 4), ("refuse", 2)])
def test_where_one_rank_fails_nothing_counts(
    way: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint before stays, and the next save is whole."""
    store, everyone = tmp_path / "store", list(range(size))
    with Job(size, "fsdp", store, 2, way, script=RANK) as job:
        codes = job.wait()
        assert codes[0] == 0, job.errors
        assert job.said[0][0] == "saved 1" and job.said[0][1].startswith("failed")
        if way == "refuse":
            assert "of 1.file: a _io.TextIOWrapper cannot be saved" in job.said[0][1]
            assert [said[-1] for said in job.said.values()] == ["loaded 2 True", "loaded 2 True"]
    found = listed(store, capsys)
    assert [iteration for iteration, ranks in found if ranks == everyone] == [10]
    assert not any(0 in ranks for iteration, ranks in found if iteration != 10)  # the coordinator's comes last
    assert loaded(store, {"of 1": {"number": 0}}) == {"of 1": {"number": 101}}
    with Job(size, "fsdp", store, 1, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
    assert loaded(store, {"of 1": {"number": 0}, "kind": ""}) == {"of 1": {"number": 101}, "kind": "fsdp"}
    assert [ranks for _, ranks in listed(store, capsys) if ranks == everyone] == [everyone] * 2
    assert not [path for path in store.rglob(".incomplete-*") if path.is_dir()]


def test_what_is_saved_beside_training_is_the_state_as_it_was(tmp_path: Path) -> None:
    with Job(2, "fsdp", tmp_path / "store", 2, "async", script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
        assert all(said == ["saved 1", "saved 2", "loaded 2 True"] for said in job.said.values())


def test_what_another_process_saves_is_counted_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is given the writer anew for each save, and keeps the plans that have not changed."""
    store = tmp_path / "store"
    with Job(2, "ddp", store, 3, "process", script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
        assert all(said == ["saved 1", "saved 2", "saved 3", "loaded 3 True"] for said in job.said.values())
    assert listed(store, capsys) == [(iteration, [0, 1]) for iteration in (12, 11, 10)]


def test_the_newest_is_what_was_saved_last_by_however_many(tmp_path: Path) -> None:
    """One process after two, then two again, whatever iterations they were told."""
    from torch.distributed.checkpoint.state_dict_saver import save

    store = tmp_path / "store"
    with Job(2, "ddp", store, 1, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
    with warnings.catch_warnings(action="ignore"):
        save({"kind": "alone"}, storage_writer=checkflow.StoreWriter(store, 3))
    assert loaded(store, {"kind": ""}) == {"kind": "alone"}
    with Job(2, "ddp", store, 1, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
    assert loaded(store, {"kind": ""}) == {"kind": "ddp"}
