"""A rank of a training in sets of ranks that train by themselves, as local SGD between two of its averages:

    python rank_in_sets.py RANKS STORE ITERATIONS

RANKS: the sets, as "03.12": those of each share one model (FSDP2); "ddp": all have one alike; "own": each has its own.
Rank 0 alone lists one thing more. It says "told LINE" of what it is told, "restored ITERATION DIGEST GENERATOR" of the
model and the optimizer, whole, as it restored them and of its generator, and "done DIGEST" at the end.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from rank_to_kill import leave, say
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import checkflow


def model_of(ranks: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    if ranks == "ddp":
        return DistributedDataParallel(model)
    if ranks != "own":
        sets = [[int(rank) for rank in of_set] for of_set in ranks.split(".")]
        mesh = DeviceMesh("cpu", sets, mesh_dim_names=("sets", "shards"))
        fully_shard(model[0], mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
    return model


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.parameters(), *(entry for state in optimizer.state.values() for entry in state.values())]
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main(ranks: str, store: str, iterations: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = model_of(ranks)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.Generator().manual_seed(rank)
    best = {"loss": 0.0}
    with checkflow.attach(
        model, optimizer, store=store, when_full="wait", generators={"batches": batches}, tell=lambda _: None,
        extra={} if rank else {"best": best}, notify=lambda line: say("told", line),
    ) as checkpointer:  # fmt: skip
        resumed = checkpointer.restore()
        say(
            "restored",
            resumed,
            digest(model, optimizer),
            hashlib.sha256(batches.get_state().numpy().tobytes()).hexdigest(),
        )
        for _ in range(resumed, int(iterations)):
            torch.autograd.backward(model(torch.randn(8, 4, generator=batches)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            best["loss"] += 1
            checkpointer.step()
        say("done", digest(model, optimizer))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
