"""What all ranks have alike is saved once: each rank has a share of it, and what is restored is all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from job_of_ranks import Job
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from checkflow.cli import run
from checkflow.distributed.parts import RankPart, all_in, marks_in
from checkflow.distributed.reading import tensors_of
from checkflow.division import Division
from checkflow.learning.kept import place_of
from checkflow.schedule import read_schedule
from checkflow.state.divided import Alike, alike_in, shared_out
from checkflow.state.names import StateName, holder_of
from checkflow.store.format.ranks import directory_of
from checkflow.training import Training

NO_END = 1_000_000
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def names_in(part: RankPart) -> set[str]:
    """The state that its own files have."""
    files = [entry.name for entry in part.checkpoint.manifest.tensor_files]
    return {StateName.of(holder_of(file), path) for file in files for path in tensors_of(part, file).tensors}


def test_each_rank_saves_its_share_and_all_that_is_its_own(tmp_path: Path) -> None:
    with Job(3, "ddp", tmp_path, 4, 0) as job:
        job.done()
    parts = all_in(tmp_path)[0].ranks
    shares = [names_in(part) for part in parts]
    own = set.intersection(*shares)
    assert {"model/1.running_mean", "model/1.running_var", "extra.losses/tensor"} <= own
    alike = [share - own for share in shares]
    assert sum(map(len, alike)) == len(set.union(*alike)) == 6 * 3
    assert all(alike)
    for rank, part in enumerate(parts):
        assert set(part.record.elsewhere) == set.union(*alike) - alike[rank]
        assert all(name in alike[saver] for name, saver in part.record.elsewhere.items())


@pytest.mark.parametrize(("kind", "alike"), [("hsdp", [(0, 2), (1, 3)]), ("pairs", [(0, 1), (2, 3)])])
def test_what_some_ranks_have_alike_is_divided_among_these(
    kind: str, alike: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The replicas of HSDP on 2 x 2 ranks; DistributedDataParallel over two of four."""
    with Job(4, kind, tmp_path, 4, 0) as job:
        job.done()
    parts = all_in(tmp_path)[0].ranks
    shares = [names_in(part) for part in parts]
    own = set.intersection(*shares)
    assert {"model/1.running_mean", "extra.losses/tensor"} <= own
    for one, other in alike:
        shards = parts[one].record.shards
        assert shards == parts[other].record.shards and bool(shards) == (kind == "hsdp")
        empty = {name for name, shard in shards.items() if 0 in shard.sizes}  # of a parameter with one row
        first, second = (shares[rank] - own - empty for rank in (one, other))
        assert first and second and len(first | second) == 6 * 3 - len(empty)
        assert parts[one].record.elsewhere == dict.fromkeys(second, other)
        assert parts[other].record.elsewhere == dict.fromkeys(first, one)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp", "zero"] if NIGHTLY else ["ddp", "fsdp", "zero"])
def test_each_rank_learns_its_own_schedule(kind: str, tmp_path: Path) -> None:
    """Of its share, or of its part; killed under it, the job goes on with the same bits."""
    with Job(2, kind, tmp_path, NO_END, 0.01, "link=4") as job:  # a busy machine's may not carry even that little
        while not all(job.numbers(rank, "learned") for rank in job.ranks):
            job.reach(min(map(job.iteration, job.ranks)) + 1)
        job.reach(max(map(job.iteration, job.ranks)) + 5)
        job.kill()
        job.wait()
        begun, promised = job.begun(), job.common("staged")
    folders = [tmp_path / directory_of(rank, 2) / "learned" for rank in range(2)]
    while not all(any(folder.glob("*.schedule.json")) for folder in folders):  # the planner may still be writing
        time.sleep(0.1)
    planned = [
        {view.name for row in read_schedule(path).state for view in row.views if row.written}
        for folder in folders
        for path in folder.glob("*.schedule.json")
    ]
    last = "model/3.weight" if kind == "tp" else "model/4.weight"
    assert {"model/0.weight", last, "optimizer/0.weight.exp_avg"} <= set.union(*planned)
    alike = {name for name in set.intersection(*planned) if not name.startswith(("model/1.", "extra."))}
    assert bool(alike) == (kind not in ("ddp", "hsdp", "zero"))
    ends = []
    for store in (tmp_path, tmp_path / "uninterrupted"):
        with Job(2, kind, store, begun + 1, 0) as job:
            ends.append(job.done())
    assert promised <= ends[0][0][0] <= begun
    assert [digest for _, digest in ends[0].values()] == [digest for _, digest in ends[1].values()]
    if kind == "fsdp":  # divided otherwise, it has another schedule
        with Job(2, "ddp", tmp_path, begun + 4, 0) as job:
            job.done()
            assert not any("learns its schedule anew" in line for said in job.errors.values() for line in said)


def test_where_ranks_do_not_see_each_other_each_saves_all(tmp_path: Path) -> None:
    """As on machines with a disk of their own."""
    store = tmp_path / "disk-{rank}"
    with Job(2, "ddp", store, 4, 0) as job:
        job.done()
    for rank in range(2):
        (part, *_) = marks_in(tmp_path / f"disk-{rank}" / directory_of(rank, 2)).values()
        assert not part.record.elsewhere
        assert {"model/0.weight", "model/4.weight"} <= names_in(part)
    ends = []
    for found in (store, tmp_path / "uninterrupted"):
        with Job(2, "ddp", found, 8, 0) as job:
            ends.append(job.done())
    assert {resumed for resumed, _ in ends[0].values()} == {4}
    assert [digest for _, digest in ends[0].values()] == [digest for _, digest in ends[1].values()]


def test_a_share_that_does_not_verify_is_missed_by_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Job(2, "ddp", tmp_path, 4, 0, "persist_every=1", "when_full=wait") as job:
        job.done()
    newest, before = all_in(tmp_path)[:2]
    assert (newest.mark.iteration, before.mark.iteration) == (4, 3)
    share = newest.ranks[1].checkpoint.path / "optimizer.safetensors"
    share.write_bytes(share.read_bytes()[:-1] + bytes([share.read_bytes()[-1] ^ 1]))
    assert run(["export", str(tmp_path), "--to", "torch", "-o", str(tmp_path / "whole.pt")]) == 0
    said = capsys.readouterr()
    assert "iteration-3, verified, as torch" in said.out
    assert "rank-1-of-2/optimizer.safetensors: " in said.err
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert state["model"]["0.weight"].shape == state["optimizer"]["0.weight.exp_avg_sq"].shape == (32, 16)
    with Job(2, "ddp", tmp_path, 6, 0) as job:
        assert {resumed for resumed, _ in job.done().values()} == {3}


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 100), min_size=1, max_size=9), st.integers(1, 5))
def test_shares_are_about_as_large(sizes_bytes: dict[str, int], ranks: int) -> None:
    division = Division.of(0, [(range(ranks), sizes_bytes)])
    if ranks == 1 or len(sizes_bytes) < ranks:
        assert division is None
        return
    assert division is not None
    shares = [sum(size for name, size in sizes_bytes.items() if division.saver_of(name) == r) for r in range(ranks)]
    assert all(shares)
    assert sum(shares) == sum(sizes_bytes.values())
    assert division.is_even(sizes_bytes) == (max(shares) <= 2 * min(shares))
    least = _least(sorted(sizes_bytes.values(), reverse=True), [0] * ranks)
    assert max(shares) <= (4 / 3 - 1 / (3 * ranks)) * least


def test_what_was_learned_is_of_one_share(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    alone = Training(model, torch.optim.SGD(model.parameters()), lambda: None)
    shares = [((0, 1), {"model/weight": 16, "model/bias": 8})]
    ways = [(0, False), (1, False), (0, True)]
    of_a_share = [shared_out(alone, rank, shares, entries_stay=stay) for rank, stay in ways]
    places = [place_of(tmp_path, training, None, "rolling") for training in (alone, *of_a_share, *of_a_share)]
    assert len(set(places)) == 1 + len(ways)


def _least(sizes: list[int], shares: list[int]) -> int:
    """The fullest share where it is as small as can be: all ways are tried."""
    if not sizes:
        return max(shares)
    tried: dict[int, int] = {}
    for place, share in enumerate(shares):
        tried.setdefault(share, place)
    return min(_least(sizes[1:], [*shares[:p], shares[p] + sizes[0], *shares[p + 1 :]]) for p in tried.values())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_is_not_kept_alike_is_not_divided() -> None:
    def training(model: torch.nn.Module) -> Training:
        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)

    def net() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False))

    def sizes_alike(training: Training) -> dict[str, int]:
        (found,) = alike_in(training) or [Alike((), {})]
        return dict(found.sizes_bytes)

    every = {"model/0.weight": 24, "model/0.bias": 12, "model/1.weight": 12}
    assert sizes_alike(training(net())) == {}
    assert sizes_alike(training(DistributedDataParallel(net()))) == every
    head = torch.nn.Sequential(DistributedDataParallel(net()), torch.nn.Linear(1, 1))  # not the head's
    assert sizes_alike(training(head)).keys() == {f"model/0.module.{name.removeprefix('model/')}" for name in every}
    ignoring = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.bias"])  # type: ignore[no-untyped-call]
    assert "model/0.bias" not in sizes_alike(training(DistributedDataParallel(ignoring)))
    compressed = DistributedDataParallel(net())
    compressed.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert sizes_alike(training(compressed)) == every
    other = DistributedDataParallel(net())
    other.register_comm_hook(None, _another_hook)
    assert sizes_alike(training(other)) == {}
    within = DistributedDataParallel(net())
    within.register_comm_hook(None, default_hooks.fp16_compress_wrapper(_another_hook))
    assert sizes_alike(training(within)) == {}


@pytest.mark.usefixtures("alone")
def test_ranks_agree_about_what_lies_in_one_storage() -> None:
    """And what lies with a buffer is each rank's own."""
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(4)))
    bucket, other = torch.zeros(8), torch.zeros(8)
    net[0].weight.data, net[1].weight.data = bucket[:4].view(2, 2), bucket[4:].view(2, 2)
    net[2].weight.data = other[:4].view(2, 2)
    net.register_buffer("beside", other[4:])
    (found,) = alike_in(Training(DistributedDataParallel(net), torch.optim.SGD(net.parameters()), lambda: None))
    assert found.sizes_bytes == {"model/0.weight": 16, "model/1.weight": 16, "model/3.weight": 16}
    assert found.shares_with == {"model/1.weight": "model/0.weight"}


@pytest.mark.usefixtures("alone")
def test_of_what_is_wrapped_only_that_is_alike_which_its_sum_updates() -> None:
    def named(training: Training) -> set[str]:
        return {name for found in alike_in(training) for name in found.sizes_bytes}

    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False))
    net[0].requires_grad_(False)
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    every = {"model/0.weight", "model/0.bias", "model/1.weight"}
    assert named(Training(wrapped, optimizer, lambda: None)) == every
    assert named(Training(wrapped, torch.optim.SGD(net[1].parameters(), lr=0.1), lambda: None)) == every
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    assert named(Training([wrapped, average], optimizer, lambda: None)) == {
        name.replace("model/", "model.0/") for name in every
    }
    average.requires_grad_(False)
    assert all(name.startswith("model.0/") for name in named(Training([wrapped, average], optimizer, lambda: None)))
    net[0].bias.requires_grad_(True)
    net.append(torch.nn.Linear(1, 1))
    after = torch.optim.SGD(net.parameters(), lr=0.1)
    assert named(Training(wrapped, after, lambda: None)) == every


def _another_hook(_state, bucket):  # type: ignore[no-untyped-def] # torch refuses other annotations
    """Each rank has its own gradient."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
