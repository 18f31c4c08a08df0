"""What ranks had each for itself, and other ranks than before restore: what nobody takes, or takes twice, is told."""

from __future__ import annotations

from pathlib import Path

import rank_with_experts
from job_of_ranks import Job

RANK = Path(rank_with_experts.__file__)


def run(size: int, kind: str, store: Path, iterations: int, *chosen: int, code: int = 0) -> tuple[list[str], Job]:
    """The lines that any rank is told of the store of all, without the place."""
    with Job(size, kind, store, iterations, *chosen, script=RANK) as job:
        assert set(job.wait().values()) == {code}, job.errors
        lines = [line for said in job.said.values() for line in said]
    start = f"told {store}: "
    return [line.removeprefix(start) for line in lines if line.startswith(start)], job


def experts(job: Job) -> list[str]:
    return [line for said in job.said.values() for line in said if line.startswith("expert")]


def test_what_fewer_ranks_leave_is_told_and_what_more_lack_when_they_come_back(tmp_path: Path) -> None:
    assert run(2, "experts", tmp_path, 5)[0] == []
    told, _ = run(1, "experts", tmp_path, 8)
    assert told == [
        "no rank restores rank 1's own model/expert.weight, model/expert.bias and 2 others: as many ranks as saved "
        "iteration 5 would (2)"
    ]
    told, job = run(2, "experts", tmp_path, 9, code=1)
    assert told == [
        "iteration 8 was saved by one rank, and has not rank 1's own model/expert.weight, model/expert.bias and 2 "
        "others, which iteration 5 of 2 ranks has: restore(5) takes it from there"
    ]
    assert any(
        "rank 1: model/only.weight: is in this model, but not in the checkpoint" in line for line in job.errors[0]
    )
    told, job = run(2, "experts", tmp_path, 9, 5)
    assert told == [] and len(set(experts(job))) == 2


def test_what_several_ranks_leave_and_what_is_taken_twice_is_told(tmp_path: Path) -> None:
    run(4, "named", tmp_path, 3)
    told, job = run(2, "named", tmp_path, 5)
    assert told == [
        "no rank restores rank 2's own model/expert.weight, model/expert.bias, nor what one more rank had: as many "
        "ranks as saved iteration 3 would (4)"
    ]
    assert len(set(experts(job))) == 2
    told, job = run(5, "named", tmp_path, 6)
    assert told == [
        "rank 2 restores a copy of rank 0's own model/expert.weight, model/expert.bias, and 2 more ranks likewise: "
        "iteration 5 has them of 2 ranks, not of 5"
    ]
    assert len(set(experts(job))) == 2


def test_of_what_all_had_alike_nothing_is_told(tmp_path: Path) -> None:
    """Though each rank has saved it for itself, and nothing but its bytes says so."""
    for size, iterations in ((3, 4), (1, 6), (3, 8), (2, 9)):
        assert run(size, "alike", tmp_path, iterations)[0] == []
