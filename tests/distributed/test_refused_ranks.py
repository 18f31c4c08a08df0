"""What ranks are refused: in one line on each of them, and nobody waits for good."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from job_of_ranks import Job

import checkflow

RANK = Path(__file__).parent / "rank_to_refuse.py"
BOTH = {
    "differs": r"PeerError: interval: is 1 on rank 0, but 2 on rank 1; give every rank the same",
    "policies": r"PeerError: schedule: is 'of checkflow' on rank 0, but 'of synchronous' on rank 1; give every",
    "schedule": r"\w+: (rank \d: )?schedule: is of lowdiff_plus, .* --policy rolling",
    "factors": r"\w+: (rank \d: )?schedule: has gradients leave as their factors, .* --world-size",
    "policy": r"\w+: (rank \d: )?policy: 'lowdiff_plus' is for one process; use 'rolling' or 'lowdiff'",
    "learned by": r"PeerError: policy: is None on rank 0, but 'checkfreq' on rank 1; give every rank the same",
    "slots": r"\w+: (rank \d: )?slots: 1 has no room for the next checkpoint before every rank .*",
    "overhead": r"\w+: (rank \d: )?overhead: is not supported for several processes; give interval=.*",
    "copies": r"\w+: (rank \d: )?replicate: 2 is not supported; use 0, or 1 for a copy on another machine",
    "copied": r"PeerError: replicate: is 0 on rank 0, but 1 on rank 1; give every rank the same",
    "bucket": r"PeerError: bucket: is 'file://.*/bucket-0' on rank 0, but 'file://.*/bucket-1' on rank 1; give every",
    "alone": r"InputError: .*alone/rank-\d-of-2 holds checkpoints of iterations 1, and nothing was restored",
    "more": r"\w+: .*more: .* there are only rank-2-of-3, without rank-0-of-3, rank-1-of-3; restore the missing",
    "zero": r"\w+: (rank \d: )?optimizer: ZeroRedundancyOptimizer of parameters that are sharded \(DTensor\) is not",
    "overlap": r"\w+: (rank \d: )?optimizer: ZeroRedundancyOptimizer\(overlap_with_ddp=True\) updates .*; leave",
    "iteration": r"\w+: .*has no checkpoint of iteration 7 that all 2 ranks have; they have 1",
    "unrestored": r"InputError: .*rank-\d-of-2 holds checkpoints of iterations 1, and nothing was restored",
    "asked": r"InputError: restore: rank 0 asks for iteration 1, and rank 1 for the newest checkpoint; give every",
    "again": r"done",
    "no number": r"\w+: (rank 1: )?restore: iteration: 'one' is no whole number; give how many were completed",
    "never": r"done",
    "anew": r"done",
    "unsharded": r"done",
    "saved": r"done",
    "replicas": r"\w+: (rank \d: )?step: ranks that had parameters alike may not have them so any more: the sum",
    "hooked": r"\w+: (rank \d: )?step: ranks that had parameters alike may not have them so any more: the sum",
    "not sent": r"CheckflowError: model/\w+: ranks 0, 1 are replicas and do not begin with the same bytes; give each",
    "parted": r"StoreError: .*ranks that train the same parameters keep other optimizer state of them, .*; attach what",
    "unlike": r"CheckflowError: model/weight: ranks 0, 1 are replicas and do not begin with the same bytes; give each",
}
EACH = {
    "no path": [r"PeerError: rank 1: store: None is of type NoneType; give a path", r"InputError: store: None is of"],
    "no time": [r"PeerError: rank 1: peers_deadline_s: -1.0 is not positive; use", r"InputError: peers_deadline_s: -1"],
    "no bucket": [r"PeerError: rank 1: bucket: ", r"InputError: bucket: "],
    "one": [r"PeerError: rank 1: when_full: 'sometimes' is not known", r"InputError: when_full: 'sometimes' is not"],
    "model": [r"PeerError: rank 1: model/weight: has shape \(3, 3\), \(2, 3\)", r"InputError: model/weight: has shape"],
    "waits": [r"PeerError: step\(\): not every rank has come to it within 0.5 s; call it on every rank", r"done"],
    "saves alone": [r"PeerError: save\(\): rank 1 has not come to it within 0.5 s; call it on every rank", r"done"],
    "late": [
        r"CheckflowError: .*iteration [12] has no part of every rank after 0.2 s, .*call step\(\) on every",
        r"done",
    ],
    "missing": [r"PeerError: attach\(\): rank 1 has not come to it within 0.5 s; call it on every rank", r"done"],
}


def iteration(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_factors() -> checkflow.Training:
    """Gradients of one sample are products of two vectors."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, step)


def test_each_is_one_line(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(model, optimizer, store=tmp_path / "alone") as checkpointer:
        checkpointer.step()
    (tmp_path / "more").mkdir()
    (tmp_path / "alone").rename(tmp_path / "more" / "rank-2-of-3")
    shutil.copytree(tmp_path / "more", tmp_path / "never")
    (tmp_path / "more" / "rank-2-of-3" / "whole").touch()
    with checkflow.attach(model, optimizer, store=tmp_path / "alone") as checkpointer:
        checkpointer.step()
    training = checkflow.Training(model, optimizer, partial(iteration, model, optimizer))
    checkflow.compile(training, bandwidth="1GB/s", policy="lowdiff_plus", output=tmp_path / "lowdiff_plus.json")
    factored = checkflow.compile(
        with_factors, device="h100", bandwidth="500MB/s", policy="rolling", output=tmp_path / "rolling.json"
    )
    assert any(row.factor_rows for row in factored.gradients)
    for rank, policy in enumerate(("checkflow", "synchronous")):
        checkflow.compile(
            training, bandwidth="1GB/s", interval=1, policy=policy, output=tmp_path / f"policy-{rank}.json"
        )
    with Job(2, tmp_path, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
    assert [line.partition(":")[0] for line in job.said[0]] == [line.partition(":")[0] for line in job.said[1]]
    for rank, said in job.said.items():
        for name, _, line in (each.partition(": ") for each in said):
            assert re.match(BOTH.get(name) or EACH[name][rank], line), (rank, name, line)
    with pytest.raises(checkflow.InputError, match="replicate: 1, but this training has one process"):
        checkflow.attach(model, optimizer, store=tmp_path / "one", replicate=1)
    with checkflow.attach(model, optimizer, store=tmp_path / "more") as checkpointer:
        with pytest.raises(checkflow.CorruptStoreError, match="there are only rank-2-of-3"):
            checkpointer.restore()
        with pytest.raises(checkflow.InputError, match="nothing was restored"):
            checkpointer.step()


def test_ranks_whose_values_part_are_told(tmp_path: Path) -> None:
    """By updates of gradients that were not summed; not where they are alike, however they came to be."""
    parts = ("local", "thawed")
    with Job(2, tmp_path, *parts, "by hand", "accumulated", "ascent", script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
    for said in job.said.values():
        for name, _, line in (each.partition(": ") for each in said):
            told = (
                r".*ranks that train the same parameters have other values of them, .*; attach what"
                if name in parts
                else "$"
            )
            assert re.match(f"CheckflowError: {told}", line), (name, line)
