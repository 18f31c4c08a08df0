"""A training goes on with other ranks, divided otherwise: it has the same state, byte for byte."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from job_of_ranks import Job

RANK = Path(__file__).parent / "rank_to_reshard.py"
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KINDS = [("fsdp", 4), ("tp", 2), ("ddp", 3), ("alone", 1), ("both", 4), ("fsdp", 3), ("tp", 3), ("ddp", 2), ("fsdp", 2)]
PAIRS = list(itertools.permutations(KINDS, 2)) if NIGHTLY else []
CHAINS = [[("fsdp", 4), ("tp", 2), ("ddp", 3), ("alone", 1), ("fsdp", 3)], *map(list, PAIRS)]


def words(job: Job, size: int, which: str) -> tuple[int, str]:
    """What all ranks said behind a word, which has to be the same."""
    assert set(job.wait().values()) == {0}, job.errors
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
        iterations += 3
