"""A rank that attaches in ways that are refused, one after the other: python rank_to_refuse.py FOLDER [KIND ...].

It says "NAME: KIND: MESSAGE" of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rank_to_kill import leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import checkflow


def training(divided: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    if divided:
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def attach(store: Path, **options: object) -> checkflow.Checkpointer:
    model, optimizer = training()
    return checkflow.attach(model, optimizer, store=store, tell=lambda _: None, **options)  # type: ignore[arg-type]


def zero(store: Path, *, overlaps: bool = False) -> None:
    """Of what FSDP2 divides already, or one that updates within the backward pass."""
    model, _ = training(divided=not overlaps)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1)
    checkflow.attach(model, optimizer, store=store)


def no_such_iteration(store: Path) -> None:
    with attach(store) as checkpointer:
        checkpointer.step()
    with attach(store) as checkpointer:
        checkpointer.restore(7)


def asked_otherwise(store: Path, rank: int, of_second: object = None) -> None:
    with attach(store) as checkpointer:
        checkpointer.restore(of_second if rank else 1)  # type: ignore[arg-type]


def restored_after_all(store: Path) -> None:
    """What another call asked for was not there."""
    with attach(store) as checkpointer:
        for _ in range(2):
            try:
                checkpointer.restore(7)
            except checkflow.StoreError:
                time.sleep(0.1 * dist.get_rank())
        assert checkpointer.restore() == 1


def not_restored(store: Path) -> None:
    with attach(store) as checkpointer:
        checkpointer.step()


def restored(store: Path) -> None:
    with attach(store) as checkpointer:
        checkpointer.restore()


def never_whole(store: Path) -> None:
    """Other ranks ended before all had a checkpoint: there is nothing to resume, and training begins."""
    with attach(store) as checkpointer:
        assert checkpointer.restore() == 0
        checkpointer.step()


def begun_anew(store: Path) -> None:
    """Beside what all ranks had, which stays."""
    with attach(store, start_over=True, when_full="wait") as checkpointer:
        assert checkpointer.restore() == 0
        for _ in range(5):
            checkpointer.step()
    (rank,) = (path for path in store.iterdir() if path.name == f"rank-{dist.get_rank()}-of-2")
    assert [path.parent.name for path in rank.glob("*/kept")] == ["00000001-iteration-1"]


def other_model(store: Path, rank: int) -> None:
    """Of one rank alone: the others have not changed anything."""
    model = torch.nn.Linear(3, 3 if rank else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with checkflow.attach(model, optimizer, store=store, tell=lambda _: None) as checkpointer:
        before = model.weight.clone()
        try:
            checkpointer.restore()
        finally:
            assert torch.equal(model.weight, before)


def steps_alone(store: Path, rank: int) -> None:
    """As under `if rank == 0`."""
    with attach(store, when_full="wait", peers_deadline_s=0.5) as checkpointer:
        for _ in range(6 if rank == 0 else 0):
            checkpointer.step()


def saves_alone(store: Path, rank: int) -> None:
    """As under `if rank == 0`."""
    with attach(store, peers_deadline_s=0.5) as checkpointer:
        checkpointer.step()
        if rank == 0:
            checkpointer.save()


def saved_by_all(store: Path) -> None:
    """An iteration that no checkpoint is due at, which stays on every rank when newer ones come."""

    def kept() -> list[Path]:
        found = store.glob("rank-*-of-2/*-iteration-3/manifest.json")
        return [path for path in found if json.loads(path.read_text())["keep"]]

    with attach(store, interval=5, when_full="wait") as checkpointer:
        for iteration in range(1, 21):
            checkpointer.step()
            if iteration == 3:
                checkpointer.save()
                dist.barrier()
                assert len(kept()) == 2
                dist.barrier()
    assert len(kept()) == 2


def steps_late(store: Path, rank: int) -> None:
    told: list[str] = []
    with attach(store, peers_deadline_s=0.2, notify=told.append) as checkpointer:
        for _ in range(2):
            time.sleep(0.5 * rank)
            checkpointer.step()
            dist.barrier()
    if told:
        raise checkflow.CheckflowError(told[0])


def unsharded_at_the_end(store: Path) -> None:
    """An evaluation leaves the root of FSDP2 as it was gathered."""
    model, optimizer = training(divided=True)
    with checkflow.attach(model, optimizer, store=store, tell=lambda _: None) as checkpointer:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(1, 3))
            checkpointer.step()
        checkpointer.save()


def replicas(store: Path, begins: float = 0.0) -> None:
    """HSDP of one weight and one bias, whose second update leaves out the all-reduce; it ends with what it was told."""
    told: list[str] = []
    model = torch.nn.Linear(3, 2)
    replica = fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    torch.nn.init.constant_(model.weight, begins)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkflow.attach(model, optimizer, store=store, notify=told.append) as checkpointer:
        for all_reduce in (True, False):
            replica.set_requires_all_reduce(all_reduce)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            checkpointer.step()
    raise checkflow.CheckflowError("; ".join(told))


def hooked(store: Path) -> None:
    """DDP gets a communication hook when its state is divided already."""
    model, _ = training()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with checkflow.attach(wrapped, optimizer, store=store, tell=lambda _: None) as checkpointer:
        checkpointer.step()
        wrapped.register_comm_hook(None, _own_gradient)
        checkpointer.step()


def told_of(store: Path, kind: str, rank: int) -> None:
    """Ranks whose parameters part, or do not: it ends with what they are told while iterations go on."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(kind != "thawed")
    wrapped, told = DistributedDataParallel(model), list[str]()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    x = torch.full((1, 3), 1.0 + rank)

    def backward() -> None:
        wrapped(x).sum().backward()

    def iterate(number: int) -> None:
        if kind in ("local", "by hand", "accumulated", "ascent"):
            with wrapped.no_sync():
                backward()
        before = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                if kind == "by hand":
                    dist.all_reduce(parameter.grad)
                if kind == "ascent":
                    parameter.add_(parameter.grad)  # type: ignore[arg-type]
        if kind in ("accumulated", "ascent", "thawed"):
            backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        if kind == "local" and number % 4 == 3:
            for parameter in model.parameters():
                dist.all_reduce(parameter.detach())

    with checkflow.attach(
        wrapped, optimizer, store=store, tell=lambda _: None, notify=told.append, when_full="wait"
    ) as checkpointer:
        model.requires_grad_(True)
        for number in range(100):
            if number < 8:
                iterate(number)
            checkpointer.step()
            time.sleep(0.01)
    others = ("no schedule", "was written after step()")
    raise checkflow.CheckflowError("; ".join(line for line in told if not any(other in line for other in others)))


def parted(store: Path, rank: int) -> None:
    """One rank alone makes the update, and sends what comes of it. Whoever hears of it first still does its part of
    the iterations, for which the other waits."""
    model, optimizer = training()
    wrapped = DistributedDataParallel(model)
    heard: checkflow.StoreError | None = None
    with checkflow.attach(wrapped, optimizer, store=store, tell=lambda _: None) as checkpointer:
        for number in range(1000):
            if number < 3:
                wrapped(torch.ones(1, 3)).sum().backward()
                if rank == 0:
                    optimizer.step()
                for parameter in model.parameters():
                    dist.broadcast(parameter.detach(), 0)
                optimizer.zero_grad()
            time.sleep(0.01)
            try:
                checkpointer.step()
            except checkflow.StoreError as error:
                heard = error
            if heard is not None and number >= 2:
                raise heard


def not_sent(store: Path, rank: int) -> None:
    """DDP is told not to send what the first rank begins with; it ends with what it was told."""
    told: list[str] = []
    torch.manual_seed(rank)
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 2), init_sync=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with checkflow.attach(wrapped, optimizer, store=store, tell=lambda _: None, notify=told.append) as checkpointer:
        checkpointer.step()
    raise checkflow.CheckflowError("; ".join(told))


def _own_gradient(_state, bucket):  # type: ignore[no-untyped-def] # torch refuses other annotations
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def main(folder: Path, kinds: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tries: dict[str, Callable[[], object]] = {
        "differs": lambda: attach(folder / "a", interval=1 + rank),
        "policies": lambda: attach(folder / "a", schedule=folder / f"policy-{rank}.json"),
        "schedule": lambda: attach(folder / "a", schedule=folder / "lowdiff_plus.json"),
        "factors": lambda: attach(folder / "a", schedule=folder / "rolling.json"),
        "policy": lambda: attach(folder / "a", policy="lowdiff_plus"),
        "learned by": lambda: attach(folder / "a", policy="checkfreq" if rank else None),
        "slots": lambda: attach(folder / "a", slots=1),
        "overhead": lambda: attach(folder / "a", overhead=0.05),
        "copies": lambda: attach(folder / "a", replicate=2),
        "copied": lambda: attach(folder / "a", replicate=rank),
        "bucket": lambda: attach(folder / "a", bucket=f"file://{folder}/bucket-{rank}"),
        "no path": lambda: attach(None if rank else folder / "a"),  # type: ignore[arg-type]
        "no time": lambda: attach(folder / "a", peers_deadline_s=-1.0 if rank else 60.0),
        "no bucket": lambda: attach(folder / "a", bucket="nowhere" if rank else None),
        "one": lambda: attach(folder / "a", when_full="sometimes" if rank else "skip"),
        "alone": lambda: not_restored(folder / "alone"),
        "more": lambda: restored(folder / "more"),
        "never": lambda: never_whole(folder / "never"),
        "zero": lambda: zero(folder / "a"),
        "overlap": lambda: zero(folder / "a", overlaps=True),
        "iteration": lambda: no_such_iteration(folder / "b"),
        "unrestored": lambda: not_restored(folder / "b"),
        "model": lambda: other_model(folder / "b", rank),
        "asked": lambda: asked_otherwise(folder / "b", rank),
        "again": lambda: restored_after_all(folder / "b"),
        "no number": lambda: asked_otherwise(folder / "b", rank, "one"),
        "anew": lambda: begun_anew(folder / "b"),
        "unsharded": lambda: unsharded_at_the_end(folder / "c"),
        "replicas": lambda: replicas(folder / "f"),
        "unlike": lambda: replicas(folder / "g", begins=float(rank)),
        "hooked": lambda: hooked(folder / "h"),
        "not sent": lambda: not_sent(folder / "l", rank),
        "waits": lambda: steps_alone(folder / "d", rank),
        "saves alone": lambda: saves_alone(folder / "n", rank),
        "saved": lambda: saved_by_all(folder / "o"),
        "late": lambda: steps_late(folder / "e", rank),
        "parted": lambda: parted(folder / "m", rank),
        "missing": lambda: attach(folder / "a", peers_deadline_s=0.5) if rank == 0 else None,
    }
    told = {kind: partial(told_of, folder / kind, kind, rank) for kind in kinds}
    for name, attempt in (told or tries).items():
        try:
            attempt()
            said = "done"
        except checkflow.CheckflowError as error:
            said = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{name}: {said}\n")
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
