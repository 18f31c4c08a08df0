"""The disk of one rank refuses: the others' iterations, and its own, go on being staged."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_of_ranks import LONGEST_S, Job
from processes import children, command, refusing, until

NO_END = 1_000_000
PAUSE_S = 0.02


@pytest.mark.parametrize("policy", ["whole", "rolling"])
def test_a_disk_that_refuses_keeps_no_iteration_out_of_memory(policy: str, tmp_path: Path) -> None:
    """Many checkpoints would be due meanwhile. All are killed then, and the disk takes what was staged last."""
    how = ["policy=rolling", "link=0.5"] if policy == "rolling" else []
    with Job(2, "ddp", tmp_path / "store", NO_END, PAUSE_S, "persist_every=5", *how) as job:
        if how:
            job.learned()
        job.reach(job.begun() + 12)
        (saver,) = [pid for pid in children(job.ranks[1].pid) if "checkflow.store.saver" in command(pid)]
        with refusing(saver):
            until(lambda: any("is tried again" in line for line in job.errors[1]), LONGEST_S)
            job.reach(job.begun() + 60)
            until(lambda: job.common("staged") >= job.begun() - 30, LONGEST_S)
            job.kill()
            staged = job.common("staged")
    with Job(2, "ddp", tmp_path / "store", 0, 0, *how[:1]) as job:
        (resumed,) = {iteration for iteration, _ in job.done().values()}
    assert resumed >= staged
