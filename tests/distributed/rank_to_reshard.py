"""A rank of a training that goes on with other ranks, each time divided otherwise:

    python rank_to_reshard.py KIND STORE ITERATIONS [SCHEDULE [MEDDLES [SAVES]]]

SCHEDULE has a % where the rank's number goes. MEDDLES has an iteration of each rank, or nothing, with commas: then it
writes parameters by itself. After SAVES each rank saves, and skips what finds no slot. It says "staged ITERATION",
"restored ITERATION DIGEST" and "done ITERATION DIGEST", of all state as if one rank had it whole.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from rank_to_kill import leave, local, say
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import checkflow


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 6), torch.nn.Linear(6, 1), torch.nn.BatchNorm1d(1)
    )


def divided(kind: str, model: torch.nn.Sequential) -> torch.nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind in ("ddp", "zero", "zero_views"):
        return DistributedDataParallel(model)
    if kind == "stages":  # of a pipeline, each with the names that it has in the whole; what goes between is left out
        return model[2:] if dist.get_rank() else model[:2]
    if kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    if kind == "both":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("shards", "parallel"))
        parallelize_module(model, mesh["parallel"], plan)
        fully_shard(model, mesh=mesh["shards"])
    if kind == "wrapped":
        model[0] = checkpoint_wrapper(model[0])
    if kind in ("fsdp", "wrapped", "hsdp"):
        several = (2, dist.get_world_size() // 2) if kind == "hsdp" else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", several, mesh_dim_names=("replicas", "shards")[-len(several) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind in ("zero", "zero_views"):
        views = kind == "zero_views"
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """Of each parameter what any rank keeps of it."""
    parameters = optimizer.param_groups[0]["params"]
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return [optimizer.state.get(parameter, {}) for parameter in parameters]
    own = {number: optimizer.optim.state[p] for number, p in enumerate(parameters) if p in optimizer.optim.state}
    everyone: list[dict[int, dict[str, torch.Tensor]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    assert len(own) < len(parameters)
    return [next((found[number] for found in everyone if number in found), {}) for number in range(len(parameters))]


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    tensors = list(model.state_dict().values())
    tensors += [tensor for state in states(optimizer) for tensor in state.values()]
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def as_by_torch(kind: str, store: Path, trained: torch.nn.Module) -> bool:
    """Whether torch.distributed.checkpoint loads from the store what was saved last."""
    if kind != "alone":
        dist.barrier()  # all have closed
    fresh = get_model_state_dict(divided(kind, net()))
    with warnings.catch_warnings(action="ignore"):  # that one process alone is no group
        load({"model": fresh}, storage_reader=checkflow.StoreReader(store))
    now = get_model_state_dict(trained)
    tensors = [(value, fresh[key]) for key, value in now.items()]
    return all(torch.equal(local(one), local(other)) for one, other in tensors)  # type: ignore[arg-type]


def training(kind: str) -> checkflow.Training:
    model_divided = divided(kind, net())
    optimizer = optimizer_of(kind, model_divided)
    width = next(model_divided.parameters()).shape[1]

    def iteration() -> None:
        model_divided(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model_divided, optimizer, iteration)


def told(event: checkflow.Event) -> None:
    if isinstance(event, checkflow.Staged):
        say("staged", event.iteration)


def main(
    kind: str, store: Path, iterations: int, schedule: str | None = None, meddles: str = "", saves: str = ""
) -> None:
    late_s = 5.0 if meddles else 600.0
    if kind != "alone":
        dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["WORLD_SIZE"]))  # what is restored was another
    made = training(kind)
    (model_divided,), (optimizer,) = made.models, made.optimizers
    schedule = None if schedule is None else schedule.replace("%", os.environ["RANK"])
    meddles = meddles.split(",")[int(os.environ["RANK"])] if meddles else ""
    with checkflow.attach(
        model_divided, optimizer, store=store, schedule=schedule, when_full="skip" if saves else "wait",
        peers_deadline_s=late_s, on_event=told,
    ) as checkpointer:  # fmt: skip
        resumed = checkpointer.restore()
        say("restored", resumed, digest(model_divided, optimizer))
        for iteration in range(resumed, iterations):
            made.iteration()
            if str(iteration) == meddles:
                with torch.no_grad():
                    for parameter in model_divided.parameters():
                        parameter.mul_(1.0)
            time.sleep(0.1 * late_s if late_s < 600 else 0)
            checkpointer.step()
            if str(iteration + 1) == saves:
                checkpointer.save()
                say("saved", iteration + 1)
        say("done", resumed, digest(model_divided, optimizer))
    say("loaded", resumed, as_by_torch(kind, store, model_divided))
    if kind != "alone":
        leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
