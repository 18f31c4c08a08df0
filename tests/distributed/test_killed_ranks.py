"""Ranks, savers and directories go at any moment: what is resumed equals a run that was never interrupted."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from job_of_ranks import LONGEST_S, Job, check_same_end
from processes import children, command, until

from checkflow.cli import run
from checkflow.store.format.ranks import directory_of

NO_END = 1_000_000
PAUSE_S = 0.01
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KILLS = int(os.environ.get("CHECKFLOW_KILLS", 5 if NIGHTLY else 1))  # of each kind of training and of victim
KINDS = [("ddp", 2), ("ddp", 4), ("synced", 2), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("both", 4)]
KINDS += [
    ("joined", 2),
    ("gpt2", 2),
    ("gpt2_fsdp", 2),
    ("gpt2_fsdp", 4),
    ("zero", 2),
    ("zero", 4),
    ("zero_views", 4),
    ("zero_late", 2),
]
WHO = ["one", "all", "saver", "machine"]
OFTEN = [
    ("synced", 2, "one"),
    ("fsdp", 2, "machine"),
    ("gpt2_fsdp", 2, "all"),
    ("zero_late", 2, "one"),
    ("zero", 4, "all"),
    ("joined", 2, "all"),
]
CASES = [(*kind, who) for kind in KINDS for who in WHO] if NIGHTLY else OFTEN


def savers(job: Job, rank: int) -> set[int]:
    return {pid for pid in children(job.ranks[rank].pid) if "checkflow.store.saver" in command(pid)}


def another_than(job: Job, rank: int, killed: set[int]) -> bool:
    """Whether a rank has another saver than these."""
    return bool(savers(job, rank) - killed)


@pytest.mark.parametrize(("kind", "size", "who"), CASES)
def test_a_killed_job_resumes_as_if_it_had_not_been(kind: str, size: int, who: str, tmp_path: Path) -> None:
    draw = random.Random(f"{kind} {size} {who}")
    promised = begun = 0
    for kill in range(KILLS + 1):
        end = NO_END if kill < KILLS else begun + 1
        with Job(size, kind, tmp_path / "store", end, PAUSE_S, "persist_every=3") as job:
            now = job.resumed()
            assert promised <= now <= begun, f"after {kill} kills"
            if kill == KILLS:
                job.done()
                break
            job.reach(now + draw.randint(2, 8))
            time.sleep(draw.random() * 2 * PAUSE_S)
            victim = draw.randrange(size)
            if who == "saver":
                killed = savers(job, victim)
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                until(partial(another_than, job, victim, killed), LONGEST_S)  # which has the memory
            begun, said = job.end(who, victim)
            promised = max(promised, said)  # of lives before this one, where it was too short
    check_same_end(tmp_path, size, kind, begun + 4)


def test_a_lost_directory_is_a_clear_refusal(tmp_path: Path) -> None:
    """However short the training was that had it."""
    with Job(2, "ddp", tmp_path, 5, 0) as job:
        job.done()
    shutil.rmtree(tmp_path / directory_of(1, 2))
    with Job(2, "ddp", tmp_path, 40, 0) as job:
        assert set(job.wait().values()) == {1}
        for said in job.errors.values():
            assert "no checkpoint is whole, for rank 1 has none" in said[-1]


def test_what_was_whole_and_is_not_any_more_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank's part of the newest, or all that it had; there are older ones, of other numbers of ranks too."""
    for size, iterations in ((1, 2), (2, 4)):
        with Job(size, "fsdp", tmp_path, iterations, 0) as job:
            job.done()
    saved = {size: shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{size}")) for size in (1, 2)}
    shutil.rmtree(saved[1] / directory_of(1, 2))
    (newest,) = (saved[2] / directory_of(1, 2)).glob("*-iteration-4")
    shutil.rmtree(newest)
    for store, size, older in ((saved[1], 2, 2), (saved[2], 1, 3)):
        expected = r"iteration 4 of attempt \d+: rank 1 has no part of it any more"
        assert run(["check", str(store)]) == 0
        said = capsys.readouterr().out
        assert "iteration 4 was whole, and rank 1 has no sound part of it any more" in said
        assert "\n00000001-iteration-2: verified" in said  # which one process has left beside them
        assert run(["export", str(store), "--to", "torch", "-o", str(store / "older.pt")]) == 0
        assert re.search(f"skipped {expected}", capsys.readouterr().err)
        with Job(size, "fsdp", store, 6, 0) as job:
            assert {resumed for resumed, _ in job.done().values()} <= {older, 2}
            assert all(any(re.search(f"skipped {expected}", line) for line in said) for said in job.errors.values())
        with Job(size, "fsdp", store, 7, 0) as job:
            job.done()
            assert not any("skipped" in line for said in job.errors.values() for line in said)


def test_short_lives_leave_no_more_than_long_ones(tmp_path: Path) -> None:
    """None lasts until what it saved last is verified on all ranks."""
    for iterations in range(4, 24, 4):
        with Job(2, "ddp", tmp_path, iterations, 0) as job:
            job.done()
    for rank in range(2):
        assert len(list((tmp_path / directory_of(rank, 2)).glob("*-iteration-*"))) <= 6


def test_a_rank_that_says_nothing_is_named_and_the_job_goes_on_when_started_again(tmp_path: Path) -> None:
    """While the others hang in a collective, until torch's timeout ends them."""
    with Job(2, "ddp", tmp_path, NO_END, PAUSE_S, "persist_every=3", "peers_deadline_s=2", "timeout=6") as job:
        job.reach(5)
        job.kill([1], signal.SIGSTOP)
        assert job.ranks[0].wait(LONGEST_S) == 1
        job.kill([1])
        assert any("rank 1 says nothing any more" in line for line in job.errors[0])
        promised = job.common("staged")
        begun = job.begun()
    with Job(2, "ddp", tmp_path, begun + 3, 0) as job:
        assert {resumed for resumed, _ in job.done().values()} <= set(range(promised, begun + 1))


def test_whether_buffers_are_shared_next_is_restored(tmp_path: Path) -> None:
    """After an evaluation DistributedDataParallel does not; a new one always would."""
    ends = []
    for store, stops in (("store", (3, 4)), ("uninterrupted", (4,))):
        for iterations in stops:
            with Job(2, "synced", tmp_path / store, iterations, 0) as job:
                found = job.done()
        ends.append({rank: digest for rank, (_, digest) in found.items()})
    assert ends[0] == ends[1]
