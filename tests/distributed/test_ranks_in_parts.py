"""Ranks whose checkpoints leave in parts, with gradients: summed over ranks, or this rank's part of the sum."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import rank_to_reshard
import torch
from job_of_ranks import Job, check_same_end

import checkflow
from checkflow.distributed.parts import all_in
from checkflow.store.both.lock import StoreLock

NO_END = 1_000_000
PAUSE_S = 0.01
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KILLS = 5 if NIGHTLY else 2
POLICIES = {
    "rolling": ["policy=rolling", "link=0.5"],
    "lowdiff": ["policy=lowdiff", "link=0.7"],
    "gockpt": ["policy=gockpt", "link=0.5", "interval=3"],
}
KINDS = [
    ("ddp", 2),
    ("views", 2),
    ("even", 2),
    ("fused", 2),
    ("synced", 2),
    ("fsdp", 2),
    ("fsdp", 4),
    ("hsdp", 4),
    ("tp", 2),
]
KINDS += [("both", 4)]
CASES = [(kind, size, policy, who) for kind, size in KINDS for policy in POLICIES for who in ("one", "all", "machine")]
OFTEN = [("synced", 2, "rolling", "one"), ("fsdp", 4, "rolling", "all"), ("fsdp", 2, "gockpt", "machine")]
OFTEN += [("tp", 2, "lowdiff", "one"), ("views", 2, "rolling", "one"), ("fused", 2, "rolling", "one")]
OFTEN += [("even", 2, "lowdiff", "machine")]
CUDA = [("ddp", 2, "rolling", "one"), ("ddp", 2, "gockpt", "all"), ("fsdp", 1, "rolling", "all")]
AGAIN = [(kind, size, policy, copies) for kind, size in KINDS for policy in ("rolling", "lowdiff") for copies in (0, 1)]
AGAIN_OFTEN = [("views", 2, "rolling", 0), ("fsdp", 2, "lowdiff", 1)]


REFUSED = "restore: model/0.weight and what else ranks 0, 1 have alike are not the same on each"


@pytest.mark.parametrize(("kind", "size", "policy", "who"), CASES if NIGHTLY else OFTEN)
def test_a_killed_job_resumes_as_if_it_had_not_been(
    kind: str, size: int, policy: str, who: str, tmp_path: Path
) -> None:
    _killed(kind, size, policy, who, tmp_path)


def _killed(kind: str, size: int, policy: str, who: str, tmp_path: Path, *more: str) -> None:
    draw = random.Random(f"{kind} {size} {policy} {who}")
    resumed, options = 0, [*POLICIES[policy], "persist_every=3", "when_full=wait", *more]
    for life in range(KILLS):
        with Job(size, kind, tmp_path / "store", NO_END, PAUSE_S, *options) as job:
            if life == 0:
                job.learned()
                resumed = job.iteration(0)
            job.reach(resumed + draw.randint(6, 20))
            time.sleep(draw.random() * 2 * PAUSE_S)
            begun, promised = job.end(who, draw.randrange(size))
            assert not any("in parts" in line for lines in job.errors.values() for line in lines), job.errors
        with Job(size, kind, tmp_path / "store", begun + 1, 0, *options) as job:
            found = job.done()
        (now,) = {iteration for iteration, _ in found.values()}
        assert promised <= now <= begun
        resumed = begun + 1
    check_same_end(tmp_path, size, kind, resumed + 3, *more)


@pytest.mark.parametrize(("kind", "size", "policy", "replicate"), AGAIN if NIGHTLY else AGAIN_OFTEN)
def test_what_is_trained_again_in_mid_run_is_saved_as_it_is_now(
    kind: str, size: int, policy: str, replicate: int, tmp_path: Path
) -> None:
    """Killed after it went back to an earlier iteration, and trained on from there in lanes."""
    draw = random.Random(f"{kind} {size} {policy} {replicate}")
    options = [*POLICIES[policy], "persist_every=3", "when_full=wait", f"replicate={replicate}"]
    resumed = 0
    for life in range(KILLS):
        with Job(size, kind, tmp_path / "store", NO_END, PAUSE_S, *options, "again=10") as job:
            if life == 0:
                job.learned()
                resumed = job.iteration(0)
            job.reach(resumed + 20)  # it went back on the way
            job.reach(max(map(job.iteration, job.ranks)) + draw.randint(1, 12))
            time.sleep(draw.random() * 2 * PAUSE_S)
            begun, _ = job.end(draw.choice(["one", "all", "machine"]), draw.randrange(size))
            back = max(max(job.numbers(rank, "back")) for rank in job.ranks)
            assert back >= resumed
            assert not any("in parts" in line for lines in job.errors.values() for line in lines), job.errors
        with Job(size, kind, tmp_path / "store", begun + 1, 0, *options) as job:
            found = job.done()
        (now,) = {iteration for iteration, _ in found.values()}
        assert back <= now <= begun
        resumed = begun + 1
    check_same_end(tmp_path, size, kind, resumed + 3)


@pytest.mark.parametrize(
    ("kind", "policy", "divides"), [("ddp", "checkflow", True), ("ddp", "rolling", False), ("even", "rolling", True)]
)
def test_shares_of_very_different_sizes_are_not_made_where_gradients_go_along(
    kind: str, policy: str, divides: bool, tmp_path: Path
) -> None:
    """One layer of the first network is most of it, and one rank would have parts for twice as many iterations."""
    with Job(2, kind, tmp_path, 4, 0, f"policy={policy}") as job:
        job.done()
    assert [bool(part.record.elsewhere) for part in all_in(tmp_path)[0].ranks] == [divides] * 2


def killed_in_parts(folder: Path) -> list[str]:
    """The options of two ranks that were killed once each checkpoint was in parts, so that a restore makes updates
    again."""
    options = [*POLICIES["rolling"], "persist_every=1", "when_full=wait"]
    with Job(2, "even", folder, NO_END, PAUSE_S, *options) as job:
        job.learned()
        job.reach(job.iteration(0) + 20)
        job.end("all", 0)
    return options


def test_a_share_in_parts_that_does_not_verify_is_missed_by_all(tmp_path: Path) -> None:
    """A gradient of what another rank has alike, which both would make updates with."""
    options = killed_in_parts(tmp_path)
    for rank in range(2):
        StoreLock.acquire(tmp_path / f"rank-{rank}-of-2", print, timeout_s=60).close()  # its saver has ended
    newest, before = all_in(tmp_path)[:2]
    for part, other in zip(newest.ranks, reversed(newest.ranks), strict=True):
        assert part.record.elsewhere and part.record.replay is not None and part.record.lanes
        updated = {name for update in part.record.replay.updates for name in update.gradients}
        assert updated.isdisjoint(part.record.elsewhere) and updated <= other.record.elsewhere.keys()
    share = next(newest.ranks[1].checkpoint.path.glob("*.gradient.0.safetensors"))
    content = share.read_bytes()
    share.unlink()  # neighbours have the same file
    share.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with Job(2, "even", tmp_path, newest.mark.iteration + 1, 0, *options) as job:
        assert {resumed for resumed, _ in job.done().values()} == {before.mark.iteration}


def test_updates_that_a_rank_makes_again_otherwise_are_refused_on_each(tmp_path: Path) -> None:
    """What each read was verified, and is right; what one made of it is not what the others have."""
    options = killed_in_parts(tmp_path)
    with Job(2, "even", tmp_path, NO_END, 0, *options, "off=1") as job:
        assert set(job.wait().values()) == {1}
        for rank in range(2):
            assert not job.numbers(rank, "resumed")
            assert any(f"PeerError: {REFUSED}" in line for line in job.errors[rank]), job.errors[rank]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "size", "policy", "who"), CUDA)
def test_a_killed_job_on_cuda_resumes_as_if_it_had_not_been(
    kind: str, size: int, policy: str, who: str, tmp_path: Path
) -> None:
    _killed(kind, size, policy, who, tmp_path, "device=cuda")


def in_lanes(folder: Path, *, divided: bool = False) -> Path:
    """Schedules of two ranks, where `%` is their number."""
    for rank in range(2):
        schedule = checkflow.compile(
            rank_to_reshard.training, arguments={"kind": "ddp"}, world_size=2, rank=rank, device="h100",
            divided=divided, bandwidth="10MB/s" if divided else "20MB/s", policy="lowdiff" if divided else "rolling",
            output=folder / f"schedule-{rank}.json",
        )  # fmt: skip
        assert schedule.lanes == (3 - rank if divided else 2) and schedule.gradients
    return folder / "schedule-%.json"


@pytest.mark.parametrize(("meddles", "saves"), [("", 6), (",6", 9)])
def test_what_is_saved_by_hand_is_on_disk_in_the_end(meddles: str, saves: int, tmp_path: Path) -> None:
    """Also what was read at once, right after a start; and where one rank reads as a whole, less often."""
    script, given, store = Path(rank_to_reshard.__file__), in_lanes(tmp_path), tmp_path / "store"
    with Job(2, "ddp", store, 5, given, script=script) as job:
        assert set(job.wait().values()) == {0}, job.errors
    with Job(2, "ddp", store, 10, given, meddles, saves, script=script) as job:
        assert set(job.wait().values()) == {0}, job.errors
        assert all(f"saved {saves}" in said for said in job.said.values())
        assert not any("has not moved" in line for lines in job.errors.values() for line in lines), job.errors
    for rank in range(2):
        assert list((store / f"rank-{rank}-of-2").glob(f"*-iteration-{saves}"))


@pytest.mark.parametrize("divided", [False, True])
def test_where_one_rank_reads_as_a_whole_the_others_go_on(divided: bool, tmp_path: Path) -> None:
    """It does so less often: what the others have in between counts no more, and nobody waits for it, or says so."""
    script, given = Path(rank_to_reshard.__file__), in_lanes(tmp_path, divided=divided)
    with Job(2, "ddp", tmp_path / "store", 20, given, ",4", script=script) as job:
        assert set(job.wait().values()) == {0}, job.errors
        assert any("is written by something else than its optimizer's update" in line for line in job.errors[1])
        assert not any("in parts" in line for line in job.errors[0])
        assert any(f"every {3 if divided else 2} iterations" in line for line in job.errors[1])  # as rank 0 would
        assert not any("no part of every rank" in line for lines in job.errors.values() for line in lines)
    with Job(2, "ddp", tmp_path / "store", 20, script=script) as job:
        assert set(job.wait().values()) == {0}, job.errors
        restored = {line for said in job.said.values() for line in said if line.startswith("restored 20 ")}
        assert len(restored) == 1


def test_ranks_that_read_as_a_whole_do_so_in_the_same_iterations(tmp_path: Path) -> None:
    """One would each 3 iterations and one each 2: a checkpoint of both would come every 6."""
    script, given = Path(rank_to_reshard.__file__), in_lanes(tmp_path, divided=True)
    with Job(2, "ddp", tmp_path / "store", 20, given, "5,4", script=script) as job:
        assert set(job.wait().values()) == {0}, job.errors
    for rank in range(2):
        assert {each for each in job.numbers(rank, "staged") if 6 < each < 20} == {9, 12, 15, 18}
        assert any("when its iteration ends, every 3 iterations" in line for line in job.errors[rank])
