"""A rank that saves state_dicts by torch.distributed.checkpoint, and loads what it saved:

    python rank_to_save.py KIND STORE SAVES [die | async | process | refuse]

It says "saved N" after each and "loaded N True". With `die` its second rank is killed in the middle of the last save,
with `refuse` it has there what cannot be saved; "failed" is what the others say then. With `async` a thread saves, with
`process` another process, whose planner caches.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_to_kill import leave, local, say
from rank_to_reshard import divided, net
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

import checkflow

BESIDE = {"async": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}


class Dying(DefaultSavePlanner):
    """Killed where the first tensor is asked for, or the rank's values."""

    def resolve_data(self, write_item: WriteItem) -> object:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def state_of(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, object]:
    """What ranks share, what all have alike, and what each has by itself."""
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    rank = dist.get_rank()
    own = {"number": 100 * number + rank, "tensor": torch.full((rank + 1,), float(number)), "names": ("é", {1: b"\0"})}
    return {**states, "kind": kind, f"of {rank}": own}


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [(key, leaf) for key, each in value.items() for leaf in leaves(each)]
    return [local(value)] if isinstance(value, torch.Tensor) else [value]


def same(one: object, other: object) -> bool:
    ours, theirs = leaves(one), leaves(other)
    return len(ours) == len(theirs) and all(map(_alike, ours, theirs))


def _alike(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_alike, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def trained(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = divided(kind, net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(kind: str, store: Path, saves: int, way: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(saves)
    model, optimizer = trained(kind)
    writer = checkflow.StoreWriter(store, iteration=10)
    beside = dist.new_group()  # training has its own collectives meanwhile
    last: dict[str, object] = {}
    for number in range(1, saves + 1):
        update(model, optimizer)
        state = state_of(kind, model, optimizer, number)
        as_saved = copy.deepcopy(state)
        is_here = number == saves and dist.get_rank() == 1
        if way == "refuse" and is_here:
            state["of 1"] = {"file": sys.stdout}
        caching = DefaultSavePlanner(enable_plan_caching=way == "process")
        planner = Dying() if way == "die" and is_here else caching
        try:
            if way in BESIDE:
                future = async_save(
                    state,
                    storage_writer=writer,
                    planner=planner,
                    process_group=beside,
                    async_checkpointer_type=BESIDE[way],
                )
                update(model, optimizer)  # what is saved is the state before
                assert isinstance(future, Future)
                future.result()
            else:
                save(state, storage_writer=writer, planner=planner)
        except (CheckpointException, RuntimeError) as error:  # the first is no Exception
            say("failed", *(wrapped[0] for wrapped in getattr(error, "failures", {}).values()))
            break
        last = as_saved
        say("saved", number)
    if way != "die":
        fresh = state_of(kind, *trained(kind), -1)
        load(fresh, storage_reader=checkflow.StoreReader(store))
        say("loaded", saves, same(last, fresh))
    with contextlib.suppress(RuntimeError):
        leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
