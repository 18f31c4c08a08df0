"""A training in several processes with a bucket behind their stores: what counts there is of one iteration of all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from bucket_server import BucketServer
from click.testing import CliRunner
from job_of_ranks import Job
from processes import children, descendants, runs
from processes import command as command_of

from checkflow.checkpointing.behind_ranks import Stock
from checkflow.checkpointing.known import Kept, exchange
from checkflow.cli import check, export
from checkflow.cli import list as listing
from checkflow.distributed.group import Group
from checkflow.distributed.marks import common, next_attempt
from checkflow.distributed.parts import marks_in
from checkflow.store.bucket.names import by_rank
from checkflow.store.format.ranks import directory_of

NO_END = 1_000_000
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
LOSSES = ("machine", "uploader", "machines", "bucket", "trainers")
UPLOADER = "checkflow.store.bucket"  # in its command
LIVES = 20 if NIGHTLY else 3
PAUSE_S = 0.02
EACH = "persist_every=1"


def uploaded(job: Job, least: int) -> int:
    """Wait until each rank has said so of one iteration, and return that."""
    while (found := job.common("uploaded")) < least:
        job.reach(min(map(job.iteration, job.ranks)) + 1)
    return found


def in_bucket(server: BucketServer, size: int) -> set[int]:
    """Iterations of which every rank's manifest is there."""
    found = by_rank(server.objects.sizes())
    return set.intersection(
        *({int(name.rpartition("-")[2]) for name in found[rank, size].checkpoints} for rank in range(size))
    )


def of_ranks(store: Path) -> set[int]:
    """Of how many ranks there are checkpoints."""
    return {int(found.parent.name.rpartition("-")[2]) for found in store.glob("rank-*-of-*/*-iteration-*")}


def ends(kind: str, size: int, tmp_path: Path, store: Path, iterations: int, *options: str) -> int:
    """The job goes on to its end as one that was never interrupted; returns where it went on."""
    digests: list[dict[int, str]] = []
    began: set[int] = set()
    for place, given in ((store, options), (tmp_path / "uninterrupted", ())):
        with Job(size, kind, place, iterations, 0, *given) as job:
            done = job.done()
        began = began or {iteration for iteration, _ in done.values()}
        digests.append({rank: digest for rank, (_, digest) in done.items()})
    assert digests[0] == digests[1]
    (iteration,) = began
    return iteration


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_lost_disks_cost_nothing_that_all_have_uploaded(kind: str, server: BucketServer, tmp_path: Path) -> None:
    """All machines are, with all their processes."""
    with Job(2, kind, tmp_path / "disk-{rank}", NO_END, PAUSE_S, EACH, f"bucket={server.url}") as job:
        promised = uploaded(job, random.Random(kind).randint(4, 8))
        begun = machines_are_lost(job)
    for rank in range(2):
        shutil.rmtree(tmp_path / f"disk-{rank}")
    again = (EACH, f"bucket={server.url}")
    assert promised <= ends(kind, 2, tmp_path, tmp_path / "disk-{rank}", begun + 3, *again) <= begun
    assert begun + 3 in in_bucket(server, 2)


def machines_are_lost(job: Job) -> int:
    """All processes at once; returns how many iterations some rank has begun."""
    job.lose(job.ranks)
    job.wait()
    return job.begun()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"] if NIGHTLY else ["fsdp"])
def test_whatever_is_lost_again_and_again_it_goes_on_as_promised(
    kind: str, server: BucketServer, tmp_path: Path
) -> None:
    """Each life ends in a way that is drawn, and the next one begins no earlier than that way promises."""
    draw = random.Random(kind)
    store, given = tmp_path / "disk-{rank}", ("persist_every=2", f"bucket={server.url}")
    beside: dict[int, set[int]] = {0: set(), 1: set()}  # by rank the processes that it ever had beside it
    first = 0
    for life in range(LIVES):
        what = draw.choice(LOSSES) if NIGHTLY else LOSSES[life]
        with Job(2, kind, store, NO_END, PAUSE_S, *given) as job:
            job.reach(first + draw.randint(3, 30))
            if life == 0:
                uploaded(job, 1)  # a disk that is lost before is lost
            for rank, process in job.ranks.items():
                beside[rank] |= descendants(process.pid)
            victim = draw.randrange(2)
            if what == "bucket":
                server.out()
            if what == "uploader":
                for pid in [each for each in beside[victim] if UPLOADER in command_of(each)]:
                    os.kill(pid, signal.SIGKILL)
            if what in ("bucket", "uploader"):
                job.reach(min(map(job.iteration, job.ranks)) + draw.randint(1, 20))
            lost = {"machine": [victim], "machines": [0, 1]}.get(what, [])
            if lost:
                job.lose(lost, set.union(*(beside[rank] for rank in lost)))
            else:
                job.kill([victim])
            time.sleep(draw.random() * 0.3)
            job.kill()
            job.wait()
            begun = job.begun()
            promised = max(first, job.common("uploaded" if lost else "staged"))
        for rank in lost:
            shutil.rmtree(tmp_path / f"disk-{rank}")
        if what == "bucket":
            server.back()
        first = begun + 1
        with Job(2, kind, store, first, 0, *given) as job:
            (now,) = {iteration for iteration, _ in job.done().values()}
        assert promised <= now <= begun, (life, what)
    assert ends(kind, 2, tmp_path, store, first + 2, *given) == first


def resumed(size: int, store: Path, iterations: int, *options: str) -> int:
    """Where a job on this disk, which ends after so many, goes on."""
    with Job(size, "ddp", store, iterations, 0, *options) as job:
        (iteration,) = {iteration for iteration, _ in job.done().values()}
    return iteration


def test_what_is_damaged_there_is_passed_over_by_all_and_any_number_goes_on(
    server: BucketServer, tmp_path: Path
) -> None:
    """Of two ranks, then of three, one and two again, each time with nothing on disk."""
    bucket = f"bucket={server.url}"
    with Job(2, "ddp", tmp_path / "first", NO_END, PAUSE_S, EACH, bucket) as job:
        turns = {uploaded(job, 3)}
        while len(turns) < 6:
            turns.add(uploaded(job, max(turns) + 1))
        machines_are_lost(job)
    newest, older, *others = sorted(in_bucket(server, 2), reverse=True)
    assert len(others) <= 2  # three are retained, and one was there before older ones went
    objects = server.objects.below(directory_of(1, 2))
    (name,) = [each for each in by_rank(server.objects.sizes())[1, 2].checkpoints if each.endswith(f"-{newest}")]
    data = objects.read(f"{name}/model.safetensors")
    objects.put(f"{name}/model.safetensors", iter([data[:-1] + bytes([data[-1] ^ 1])]), len(data))
    checked = CliRunner().invoke(check.command, [server.url], standalone_mode=False)
    assert checked.return_value == 1 and f"rank's part verifies is of iteration {older}" in checked.stdout
    asked = [server.url, "--to", "torch", "-o", str(tmp_path / "whole")]
    exported = CliRunner().invoke(export.command, asked, catch_exceptions=False)
    assert f"skipped iteration {newest}, rank 1: model.safetensors: block 0 is not" in exported.stderr
    assert json.loads(torch.load(tmp_path / "whole", weights_only=True)["commit"])["iteration"] == older
    assert resumed(2, tmp_path / "second-{rank}", 0, bucket) == older
    assert resumed(3, tmp_path / "third", older + 1, bucket) == older
    assert resumed(1, tmp_path / "fourth", older + 2, bucket) == older + 1
    assert resumed(2, tmp_path / "fifth-{rank}", older + 3, bucket) == older + 2
    listed = CliRunner().invoke(listing.command, [server.url, "--json"])
    rows = {(row["processes"], row["iteration"]): row["ranks"] for row in json.loads(listed.stdout)["checkpoints"]}
    assert rows[2, older + 3] == [0, 1] and rows[1, older + 2] == [0] and rows[3, older + 1] == [0, 1, 2]
    with Job(3, "ddp", tmp_path / "third", NO_END, PAUSE_S, EACH, bucket) as job:
        while 2 in of_ranks(tmp_path / "third"):  # is downloaded, until they have one of their own
            job.reach(job.iteration(0) + 1)
    assert {found.name for found in (tmp_path / "third").iterdir()} == {directory_of(rank, 3) for rank in range(3)}


def test_what_is_damaged_on_disk_comes_from_there(server: BucketServer, tmp_path: Path) -> None:
    """Where several ranks each have a share, and the disk is one."""
    bucket = f"bucket={server.url}"
    assert resumed(2, tmp_path, 5, EACH, bucket) == 0
    asked = [server.url, "--json"]
    whole = CliRunner().invoke(check.command, asked, standalone_mode=False)
    assert whole.return_value == 0 and json.loads(whole.stdout.splitlines()[-1])["whole"][0] == 5
    (found,) = (tmp_path / directory_of(1, 2)).glob("*-iteration-5")
    (found / "optimizer.safetensors").write_bytes(b"")
    assert resumed(2, tmp_path, 6, EACH, bucket) == 5
    assert len(list((tmp_path / directory_of(1, 2)).glob("*-iteration-5"))) == 2


def test_what_a_bucket_that_is_out_may_have_is_never_taken_for_a_part_of_what_comes_after(
    server: BucketServer, tmp_path: Path
) -> None:
    """Rank 1's disk is a day old, and nobody can know that the bucket has what came since, of the same numbers."""
    bucket = f"bucket={server.url}"
    assert resumed(2, tmp_path / "disk-{rank}", 4, EACH, bucket) == 0
    shutil.copytree(tmp_path, tmp_path / "old", ignore=shutil.ignore_patterns("old"))
    assert resumed(2, tmp_path / "disk-{rank}", 8, EACH, bucket) == 4
    server.out()
    assert resumed(2, tmp_path / "old" / "disk-{rank}", 9, EACH, bucket, "retry_s=0") == 4
    server.back()
    attempts = {
        part.record.member.attempt
        for rank in range(2)
        for part in marks_in(tmp_path / "old" / f"disk-{rank}" / directory_of(rank, 2)).values()
        if part.record.member is not None and part.record.iteration == 9
    }
    assert min(attempts) > 10**6
    assert resumed(2, tmp_path / "old" / "disk-{rank}", 0, bucket) == 9


def test_what_one_process_left_there_is_downloaded_once_by_two_on_one_disk(
    server: BucketServer, tmp_path: Path
) -> None:
    """And is there until they have one of their own."""
    bucket = f"bucket={server.url}"
    assert resumed(1, tmp_path / "alone", 3, EACH, bucket) == 0
    with Job(2, "ddp", tmp_path / "two", NO_END, PAUSE_S, "persist_every=1000000", bucket) as job:
        job.reach(6)
        assert len(list((tmp_path / "two").glob("*-iteration-3"))) == 1
    with Job(2, "ddp", tmp_path / "two", NO_END, PAUSE_S, EACH, bucket) as job:
        while list((tmp_path / "two").glob("*-iteration-3")):
            job.reach(job.iteration(0) + 1)


def test_two_lives_that_do_not_see_each_other_begin_other_attempts() -> None:
    """Else rank 0's part of one and rank 1's of the other could make one checkpoint."""
    begun = {next_attempt(exchange(Group.alone(), Kept({}, {}), Stock({}, is_known=True), {}).known) for _ in range(20)}
    assert len(begun) > 18


def test_what_all_have_on_disk_at_sigterm_is_there_when_they_end(server: BucketServer, tmp_path: Path) -> None:
    with Job(2, "ddp", tmp_path / "disk-{rank}", NO_END, PAUSE_S, f"bucket={server.url}", "when_full=wait") as job:
        job.reach(20)
        beside = [pid for process in job.ranks.values() for pid in children(process.pid)]
        job.kill(number=signal.SIGTERM)
        assert 0 not in job.wait().values()
    while any(map(runs, beside)):  # what the killed ones have staged and not written
        time.sleep(0.01)
    stores = [tmp_path / f"disk-{rank}" / directory_of(rank, 2) for rank in range(2)]
    newest = common([marks_in(store) for store in stores])[0].iteration
    assert newest >= 19
    for store in stores:
        shutil.rmtree(store)
    assert resumed(2, tmp_path / "disk-{rank}", 0, f"bucket={server.url}") == newest
