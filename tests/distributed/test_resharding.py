"""A training goes on with other ranks, divided otherwise: it has the same state, byte for byte."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import rank_to_reshard
import torch
from job_of_ranks import Job

import checkflow
from checkflow.cli import run

RANK = Path(rank_to_reshard.__file__)
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KINDS = [("fsdp", 4), ("tp", 2), ("ddp", 3), ("alone", 1), ("both", 4), ("hsdp", 4), ("fsdp", 3), ("tp", 3), ("ddp", 2)]
KINDS += [("fsdp", 2), ("zero", 4), ("zero", 2), ("zero_views", 3), ("wrapped", 2)]
LONG = [("fsdp", 4), ("tp", 2), ("ddp", 3), ("alone", 1), ("fsdp", 3)]
CHAINS = (
    [LONG, *map(list, itertools.permutations(KINDS, 2))]
    if NIGHTLY
    else [
        [("fsdp", 2), ("tp", 2), ("alone", 1)],
        [("hsdp", 4), ("ddp", 2), ("wrapped", 2), ("ddp", 1)],
        [("zero", 4), ("zero", 2), ("ddp", 2), ("zero_views", 2), ("alone", 1), ("zero", 2), ("fsdp", 2)],
    ]
)


def words(job: Job, size: int, which: str) -> tuple[int, str]:
    """What all ranks said behind a word, which has to be the same."""
    assert set(job.wait().values()) == {0}, {rank: lines[-2:] for rank, lines in job.errors.items()}
    found = {tuple(line.split()[1:]) for rank in range(size) for line in job.said[rank] if line.startswith(which)}
    ((iteration, digest),) = found
    return int(iteration), digest


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(f"{kind}{size}" for kind, size in chain))
def test_what_was_saved_is_restored_by_others(chain: list[tuple[str, int]], tmp_path: Path) -> None:
    iterations, before = 0, ""
    for kind, size in chain:
        with Job(size, kind, tmp_path / "store", iterations + 3, script=RANK) as job:
            resumed, digest = words(job, size, "restored")
            assert resumed == iterations
            assert digest == before or not before
            _, before = words(job, size, "done")
            assert words(job, size, "loaded") == (iterations, "True")
        iterations += 3


IN_PARTS = [
    ("rolling", "both", 4, "10MB/s", [2, 2, 1, 1]),
    ("gockpt", "fsdp", 2, "20MB/s", [1, 1]),
    ("lowdiff", "ddp-divided", 2, "10MB/s", [3, 2]),
    ("rolling", "fsdp", 4, "5MB/s", [4, 4, 4, 3]),
    ("lowdiff", "ddp", 2, "20MB/s", [2, 2]),
    ("lowdiff", "hsdp-divided", 4, "5MB/s", [7, 9, 2, 2]),
]


@pytest.mark.parametrize(("policy", "kind", "size", "bandwidth", "lanes"), IN_PARTS if NIGHTLY else IN_PARTS[:3])
def test_what_was_saved_in_parts_is_brought_together(
    policy: str, kind: str, size: int, bandwidth: str, lanes: list[int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the ranks that saved it, by others, by torch's planner, and for other tools; also where ranks divided it."""
    store = tmp_path / "store"
    kind, _, divided = kind.partition("-")
    interval, iterations = (4, 8) if policy == "gockpt" else (1, 9)
    schedules = [
        checkflow.compile(
            rank_to_reshard.training, arguments={"kind": kind}, world_size=size, rank=rank, device="h100",
            bandwidth=bandwidth, policy=policy, interval=interval, output=tmp_path / f"schedule-{rank}.json",
            divided=bool(divided),
        )
        for rank in range(size)
    ]  # fmt: skip
    assert [schedule.lanes for schedule in schedules] == lanes
    assert any(schedule.gradients for schedule in schedules)
    with Job(size, kind, store, iterations, tmp_path / "schedule-%.json", script=RANK) as job:
        _, digest = words(job, size, "done")
        assert words(job, size, "loaded") == (0, "True")
    records = [json.loads(path.read_text()) for path in store.glob(f"*/*-iteration-{iterations}/commit.json")]
    assert len(records) == size
    assert any("replay" in record for record in records)
    elsewhere = [record.get("elsewhere", {}) for record in records]
    assert all(map(bool, elsewhere)) == bool(divided)
    assert not divided or not set.intersection(*map(set, elsewhere)), "each is some rank's"
    said = command(capsys, 0, "export", store, "--to", "torch", "-o", tmp_path / "whole.pt")
    assert "updates were made again here" in said
    exported = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert not {"member", "shards", "replay", "lanes"} & json.loads(exported["commit"]).keys()
    for others, many in ((kind, size), ("ddp", 3), ("alone", 1)):
        with Job(many, others, store, iterations, script=RANK) as job:
            assert words(job, many, "restored") == (iterations, digest)
    model = rank_to_reshard.net()
    model.load_state_dict(exported["model"])
    with checkflow.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2), store=store) as checkpointer:
        checkpointer.restore()
        assert all(torch.equal(value, exported["model"][name]) for name, value in model.state_dict().items())


def command(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """What a command says."""
    assert run([str(argument) for argument in arguments]) == code
    said = capsys.readouterr()
    return said.out + said.err


def test_several_are_listed_checked_and_exported_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    with Job(2, "fsdp", store, 3, script=RANK) as job:
        words(job, 2, "done")
    assert "attempt" in command(capsys, 0, "list", store)
    newest = json.loads(command(capsys, 0, "list", store, "--json"))["checkpoints"][0]
    assert (newest["iteration"], newest["processes"], newest["ranks"]) == (3, 2, [0, 1])
    said = command(capsys, 0, "check", store)
    assert "rank-1-of-2/" in said and "the newest of which every rank's part verifies is of iteration 3" in said
    said = command(capsys, 2, "export", store / "rank-1-of-2", "--to", "torch", "-o", tmp_path / "x")
    assert "has rank 1's part of a training in 2 processes; export the directory that has all" in said
    command(capsys, 0, "export", store, "--to", "torch", "-o", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert state["model"]["0.weight"].shape == state["optimizer"]["0.weight.exp_avg"].shape == (24, 16)
    assert not {"member", "shards"} & json.loads(state["commit"]).keys()
    part = next((store / "rank-1-of-2").glob("*-iteration-3")) / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    assert "rank-1-of-2/" in command(capsys, 1, "check", store)
    said = command(capsys, 0, "export", store, "--to", "torch", "-o", tmp_path / "older.pt")
    assert "skipped 0" in said
    assert ", verified, as torch" in said
    assert "iteration-3, verified" not in said
    said = command(capsys, 2, "export", store, "--to", "torch", "-o", tmp_path / "x", "--iteration", 9)
    assert "has no checkpoint of iteration 9 that every rank has; it has 1, " in said
    *_, last = (line for line in command(capsys, 1, "check", store, "--json").splitlines() if line.startswith("{"))
    assert json.loads(last)["whole"] in ([1], [2, 1])  # the second may have come while the first was written
    shutil.rmtree(store / "rank-1-of-2")
    said = command(capsys, 1, "check", store)
    assert "verified" in said and "no checkpoint of which every rank has a part that verifies" in said
