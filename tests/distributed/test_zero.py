"""ZeroRedundancyOptimizer: each rank keeps the state of some parameters, and receives what others made of the rest."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from job_of_ranks import Job
from rank_to_kill import net
from torch.distributed.checkpoint.state_dict_loader import load

import checkflow
from checkflow.cli import run
from checkflow.distributed.partitions import with_whole_optimizers
from checkflow.distributed.parts import Complete, all_in
from checkflow.distributed.reading import tensors_of, whole_file
from checkflow.errors import FormatError, InputError
from checkflow.state.live import parameter_names
from checkflow.state.restore import optimizers
from checkflow.training import Training

FOLDER = Path(__file__).parent
TEARS, UNUSUAL = FOLDER / "rank_to_tear.py", FOLDER / "rank_with_zero.py"
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
FILE = "optimizer.safetensors"
WAYS = ["foreach", "fused", "views", "thawing", *(["looped", "closed"] if NIGHTLY else [])]
UNUSUAL_KINDS = [("few", 4), ("pairs", 4), ("freezing", 2), ("thawing", 2), ("thawing", 3), ("buckets", 3)]
UNUSUAL_KINDS += [("plain", 4), ("tensor", 4), ("nested", 4)]


@pytest.mark.parametrize("size", [2, 4] if NIGHTLY else [2])
@pytest.mark.parametrize("way", WAYS)
def test_no_checkpoint_is_torn(way: str, size: int) -> None:
    """Whatever is planned, and however late the copies run: an update writes all parameters, and counts few writes."""
    with Job(size, way, "none", script=TEARS) as job:
        assert set(job.wait().values()) == {0}, job.errors
    assert {tuple(said) for said in job.said.values()} == {("torn 0", "staged 72")}


def test_without_the_optimizers_guard_checkpoints_are_torn() -> None:
    """So it is needed, and seen when it is missing."""
    with Job(2, "foreach", "optimizer", script=TEARS) as job:
        assert set(job.wait().values()) == {0}, job.errors
    assert min(int(said[0].removeprefix("torn ")) for said in job.said.values()) > 0


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Complete]:
    """What three ranks have saved, and where."""
    store = tmp_path_factory.mktemp("store")
    with Job(3, "zero", store, 5, 0) as job:
        job.done()
    return store, all_in(store)[0]


def own_names(parts: Complete, file: str) -> list[set[str]]:
    """By rank the tensors in its own file."""
    return [
        set(tensors_of(part, file).tensors)
        if any(entry.name == file for entry in part.checkpoint.manifest.tensor_files)
        else set()
        for part in parts.ranks
    ]


def test_each_rank_saves_the_state_that_it_keeps(parts: tuple[Path, Complete]) -> None:
    """And a share of the parameters, which all have."""
    _, found = parts
    entries, parameters = own_names(found, FILE), own_names(found, "model.safetensors")
    assert sum(map(len, entries)) == len(set.union(*entries)) == 6 * 2 and all(entries)
    buffers = set.intersection(*parameters)
    assert all(name.startswith("1.") for name in buffers)
    assert sum(len(each - buffers) for each in parameters) == 6
    partitions = [part.record.optimizers[0].partition for part in found.ranks]
    for own, partition, part in zip(entries, partitions, found.ranks, strict=True):
        assert partition is not None and partition.ranks == (0, 1, 2)
        paths = {name.removeprefix("model/") for name in partition.parameters}
        assert own == {f"{path}.{entry}" for path in paths for entry in ("exp_avg", "exp_avg_sq")}
        assert len(part.record.optimizers[0].groups) == 2
        assert not [name for name in part.record.elsewhere if name.startswith("optimizer")]


def test_the_whole_state_is_exported_and_read(parts: tuple[Path, Complete], tmp_path: Path) -> None:
    store, found = parts
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "whole.pt")]) == 0
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    saved = {name: each.view() for part in found.ranks for name, each in tensors_of(part, FILE).tensors.items()}
    assert state["optimizer"].keys() == saved.keys() and len(saved) == 6 * 2
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state["optimizer"].items())
    (optimizer,) = json.loads(state["commit"])["optimizers"]
    assert optimizer["type"] == "AdamW" and "partition" not in optimizer
    assert sorted(name for each in optimizer["cohorts"] for name in each["parameters"]) == sorted(
        name for each in optimizer["groups"] for name in each["parameters"]
    )
    fresh = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    with warnings.catch_warnings(action="ignore"):  # that one process alone is no group
        load({"optimizer": fresh}, storage_reader=checkflow.StoreReader(store))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in fresh.items())


@pytest.mark.parametrize("kept", [1, 6])
def test_who_keeps_a_part_of_the_state_keeps_no_file_in_memory(
    kept: int, parts: tuple[Path, Complete], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps all of it has it where it was read."""
    whole = with_whole_optimizers(parts[1], 0)
    file = whole_file(whole.ranks[0], FILE, dict(enumerate(whole.ranks)))
    model = net()
    every = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": every[:3]}, {"params": every[3:]}])
    monkeypatch.setattr(optimizers, "updated_here", lambda _: every[:kept])
    names = parameter_names(Training(model, optimizer, lambda: None))
    optimizers.match_optimizer(optimizer, names, whole.ranks[0].record.optimizers[0], file).apply()
    assert list(optimizer.state) == every[:kept]
    read, now = file.tensors["0.weight.exp_avg"].view(), optimizer.state[every[0]]["exp_avg"]
    assert torch.equal(read, now)
    assert (read.data_ptr() == now.data_ptr()) == (kept == len(every))


def test_parts_that_do_not_belong_together_are_no_whole(parts: tuple[Path, Complete]) -> None:
    _, found = parts
    first, second, third = found.ranks
    (optimizer,) = second.record.optimizers

    def joined(**changes: object) -> Complete:
        record = second.record.model_copy(update={"optimizers": (optimizer.model_copy(update=changes),)})
        return with_whole_optimizers(replace(found, ranks=(first, replace(second, record=record), third)), 0)

    assert joined().ranks[0].record.optimizers[0].partition is None
    with pytest.raises(FormatError, match="optimizer: rank 1 has no part of its state; take another checkpoint"):
        joined(partition=None)
    with pytest.raises(FormatError, match="optimizer: its ranks do not keep each parameter once; take another"):
        joined(partition=first.record.optimizers[0].partition)
    with pytest.raises(FormatError, match="optimizer: rank 2 has no part of its state; take another checkpoint"):
        with_whole_optimizers(replace(found, ranks=(first, second)), 0)


@pytest.mark.parametrize(("kind", "size"), UNUSUAL_KINDS if NIGHTLY else UNUSUAL_KINDS[:3])
def test_it_resumes_with_the_same_bits(kind: str, size: int, tmp_path: Path) -> None:
    ends = []
    for store, stops in ((tmp_path / "store", (4, 7)), (tmp_path / "uninterrupted", (7,))):
        for iterations in stops:
            with Job(size, kind, store, iterations, script=UNUSUAL) as job:
                found = job.done()
        ends.append(({rank: digest for rank, (_, digest) in found.items()}, [said[-2] for said in job.said.values()]))
        assert {resumed for resumed, _ in found.values()} == {stops[0] % 7}
    assert ends[0] == ends[1]


def test_state_in_a_dict_is_put_together(tmp_path: Path) -> None:
    with Job(2, "nested", tmp_path, 3, script=UNUSUAL) as job:
        job.done()
    whole = with_whole_optimizers(all_in(tmp_path)[0], 1)
    found = whole_file(whole.ranks[1], FILE, dict(enumerate(whole.ranks))).tensors
    names = {f"{number}.{name}" for number in range(3) for name in ("weight", "bias")}
    assert {name.removesuffix(".kept.sum") for name in found} == names


def test_of_two_groups_of_ranks_one_is_put_together(tmp_path: Path) -> None:
    """The other trains another model."""
    with Job(4, "pairs", tmp_path, 3, script=UNUSUAL) as job:
        job.done()
    found = all_in(tmp_path)[0]
    for rank, pair in ((0, {0, 1}), (3, {2, 3})):
        elsewhere = with_whole_optimizers(found, rank).ranks[rank].record.elsewhere
        assert {saver for name, saver in elsewhere.items() if name.startswith("optimizer/")} == pair - {rank}


def test_where_the_others_state_is_not_seen_it_is_said(tmp_path: Path) -> None:
    """Each rank has a disk of its own: it restores what it kept, and nothing else."""
    store = tmp_path / "disk-{rank}"
    for kind, iterations in (("zero", 3), ("zero", 5)):
        with Job(2, kind, store, iterations, 0) as job:
            resumed = {found for found, _ in job.done().values()}
    assert resumed == {3}
    with Job(2, "ddp", store, 7, 0) as job:
        assert set(job.wait().values()) == {1}
    assert all("put them into one directory" in said[-1] for said in job.errors.values())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_of_one_process_it_is_the_optimizer_that_it_holds(tmp_path: Path) -> None:
    """Whose checkpoint the plain one restores; policies that make updates again are refused."""
    with warnings.catch_warnings(action="ignore"):  # torch's own imports warn of what torch deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def of(store: str, optimizer: torch.optim.Optimizer, policy: str | None = None) -> checkflow.Checkpointer:
        return checkflow.attach(model, optimizer, store=tmp_path / store, policy=policy, tell=lambda _: None)

    model = torch.nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(InputError, match="policy: takes gradients, which no ZeroRedundancyOptimizer goes with"):
        of("refused", zero, policy="rolling")
    with of("store", zero) as checkpointer:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            zero.step()
            checkpointer.step()
    kept = [zero.optim.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    plain = torch.optim.AdamW(model.parameters())
    with of("store", plain) as checkpointer:
        assert checkpointer.restore() == 2
    assert plain.param_groups[0]["lr"] == 0.1
    now = [plain.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(kept, now, strict=True))
