"""A rank of a training that tests start, kill and start again:

    python rank_to_kill.py KIND STORE ITERATIONS PAUSE_S [OPTION=N ...]

It says "iteration N" after each, "staged N", "verified N", "learned N", and at the end "done RESUMED DIGEST": of all
that this rank has of the training. "{rank}" in STORE is its number. An OPTION is one of attach; or `timeout`, that of
the process group; or `device`, which is the CPU unless it is cuda; or `link`: how many times its state the planner of
what is learned believes the link to carry in an iteration; or `again`: each of so many iterations is kept, and comes
back once when half as many more are completed; or `off`: the rank that makes updates again otherwise than the others.
After `laid` iterations, or where that is "learned" once a schedule was, what the optimizer keeps is laid out anew, as
`how` says (LAID); then it says "laid N".
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from slow_link import asking
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import checkflow
from checkflow.learning.planner import Planner
from checkflow.models import gpt2
from checkflow.state.restore import replay
from checkflow.torch_internals import unhooked_step

with warnings.catch_warnings(action="ignore"):  # torch's own imports warn of what torch deprecates
    from torch.distributed.optim import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer


def net() -> torch.nn.Sequential:
    """With buffers that differ by rank."""
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(32, 1),
    )


def ddp() -> torch.nn.Module:
    """Its buckets stay as they are: else it makes others after the first iteration of each start, and the sum over more
    than two ranks has other bits."""
    return DistributedDataParallel(net(), broadcast_buffers=False, find_unused_parameters=True)


def views() -> torch.nn.Module:
    """Gradients are where they are summed, and the next ones are written there."""
    return DistributedDataParallel(
        net(), broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
    )


def layers() -> torch.nn.Sequential:
    """As large as each other, so that two ranks may have half of them each."""
    linear = partial(torch.nn.Linear, 16, 16)
    return torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), linear(), linear(), linear())


def even() -> torch.nn.Module:
    return DistributedDataParallel(layers(), broadcast_buffers=False, find_unused_parameters=True)


class Scaled(torch.nn.Module):
    """A network with parameters of one number, of which all that an optimizer keeps is of one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()
        self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.full((), 1.0 + each)) for each in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x * self.scales[0] + self.scales[1]) * self.scales[2] + self.scales[3]
        return found


def fused() -> torch.nn.Module:
    """Its optimizer's counts of updates are tensors in files."""
    return DistributedDataParallel(Scaled(), broadcast_buffers=False, find_unused_parameters=True)


def pairs() -> torch.nn.Module:
    """Two ranks each train a model of their own."""
    pair, _ = dist.new_subgroups(2)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(net(), process_group=pair, broadcast_buffers=False, find_unused_parameters=True)


def synced() -> torch.nn.Module:
    """The first rank's buffers are everybody's: DDP writes them before the model's forward pass."""
    return DistributedDataParallel(net())


class Late(torch.nn.Module):
    """A network whose first layer is first used in its fourth forward pass: its state is made by then."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.more = torch.nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.inner(x + self.more(x) if self.calls > 3 else x)
        return found


def zero(*, late: bool = False) -> torch.nn.Module:
    """As `ddp`, of buffers that are shared."""
    return DistributedDataParallel(Late() if late else net(), find_unused_parameters=True)


def fsdp(mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """With parts that are uneven, and some that are empty."""
    return sharded(net(), mesh)


def sharded(model: torch.nn.Sequential, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    for module in model:
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp() -> torch.nn.Module:
    """Replicas of a sharded model."""
    return fsdp(init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")))


def tp(mesh: DeviceMesh | None = None) -> torch.nn.Sequential:
    """Tensor parallelism: columns, rows, and a layer that is whole on each rank."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 6), torch.nn.Linear(6, 1))
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def both() -> torch.nn.Module:
    """FSDP2 of tensor parallelism, on 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parallel"))
    model = tp(mesh["parallel"])
    fully_shard(model, mesh=mesh["shards"])
    return model


class Written(torch.nn.Module):
    """A small GPT-2, whose tokens are made of the numbers that the other networks take."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2.GPT2(gpt2.SMALL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model((x.abs() * 10).long() % gpt2.SMALL.vocabulary)
        return found


def written() -> torch.nn.Module:
    return DistributedDataParallel(Written())


def written_fsdp() -> torch.nn.Module:
    """A weight that two layers share is the outermost module's."""
    model = Written()
    for block in model.model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    return model


def optimizer_of(kind: str, model: torch.nn.Module, foreach: bool | None = None) -> torch.optim.Optimizer:
    """AdamW; where ranks divide its state, of two groups, and of parameters that may be views."""
    if not kind.startswith("zero"):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach, fused=kind == "fused" or None)
    every = list(model.parameters())
    groups = [{"params": every[:3]}, {"params": every[3:], "weight_decay": 0.1}]
    views = kind == "zero_views"
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=views, lr=1e-2, foreach=foreach)


def leave() -> None:
    """At once: gloo's threads may abort an interpreter that ends, with or without checkflow in it."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "ddp": ddp,
    "views": views,
    "even": even,
    "fused": fused,
    "pairs": pairs,
    "joined": views,
    "synced": synced,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tp": tp,
    "both": both,
    "gpt2": written,
    "gpt2_fsdp": written_fsdp,
    "zero": zero,
    "zero_views": zero,
    "zero_late": partial(zero, late=True),
}


def seed(kind: str, rank: int) -> int:
    """Ranks that compute one product have the same data."""
    return {"tp": 100, "both": 100 + rank // 2}.get(kind, 100 + rank)


def say(*words: object) -> None:
    """A line at once, so that a kill leaves whole ones."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: torch.Tensor) -> str:
    found = hashlib.sha256()
    tensors = [*model.state_dict().values(), losses, torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    tensors.append(torch.tensor([group["lr"] for group in optimizer.param_groups]))
    optimizer = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        found.update(local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def flat(optimizer: torch.optim.Optimizer) -> None:
    """Of all parameters in one tensor for each entry."""
    for entry in ("exp_avg", "exp_avg_sq"):
        states = list(optimizer.state.values())
        whole = torch.cat([state[entry].flatten() for state in states])
        for state, part in zip(states, torch.split(whole, [state[entry].numel() for state in states]), strict=True):
            state[entry] = part.view_as(state[entry])


def turned(optimizer: torch.optim.Optimizer) -> None:
    """Columns lie together where rows did."""
    for state in optimizer.state.values():
        for entry in ("exp_avg", "exp_avg_sq"):
            state[entry] = state[entry].mT.contiguous().mT if state[entry].dim() == 2 else state[entry]


LAID: dict[str, Callable[[torch.optim.Optimizer], None]] = {"flat": flat, "turned": turned}


def off(optimizer: torch.optim.Optimizer) -> None:
    """An update, and a little more."""
    unhooked_step(optimizer)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].view(-1)[0] += 1e-3


def main(kind: str, store: str, iterations: int, pause_s: float, options: dict[str, object]) -> None:
    device = str(options.pop("device", "cpu"))
    backend = "gloo" if device == "cpu" or kind == "ddp" else "cpu:gloo,cuda:nccl"  # which wants a device for each rank
    dist.init_process_group(backend, timeout=timedelta(seconds=float(str(options.pop("timeout", 1800)))))
    rank = dist.get_rank()
    torch.manual_seed(0)
    with torch.device(device):
        model = KINDS[kind]()
    if kind == "fsdp":
        with torch.no_grad():
            model(torch.randn(8, 16, device=device))  # as who looks at it first; the outermost parameters stay gathered
    optimizer = optimizer_of(kind, model)
    losses = torch.zeros((), device=device)
    torch.manual_seed(seed(kind, rank))

    learned: list[bool] = []

    def told(event: checkflow.Event) -> None:
        if isinstance(
            event, (checkflow.Staged, checkflow.Mirrored, checkflow.Verified, checkflow.Uploaded, checkflow.Learned)
        ):
            say(type(event).__name__.lower(), event.iteration)
        learned.append(isinstance(event, checkflow.Learned))

    again, kept = int(str(options.pop("again", 0))), 0
    if int(str(options.pop("off", -1))) == rank:
        setattr(replay, "unhooked_step", off)  # noqa: B010
    laid, lay = options.pop("laid", 0), LAID[str(options.pop("how", "flat"))]
    options |= {"extra": {"losses": losses}, "on_event": told}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) if kind.startswith("zero") else None
    options |= {"scheduler": scheduler}
    own = model.module if kind == "joined" else model
    with checkflow.attach(own, optimizer, store=store.format(rank=rank), **options) as checkpointer:  # type: ignore[arg-type]
        resumed = iteration = checkpointer.restore()
        say("resumed", resumed)
        while iteration < iterations:
            with Join([model]) if kind == "joined" else nullcontext():  # type: ignore[list-item]
                for _ in range(1 + (iteration + rank) % 3 if kind == "joined" else 1):
                    loss = model(torch.randn(8, 16, device=device)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            losses += loss.detach()
            if laid == iteration + 1 or (laid == "learned" and any(learned)):
                lay(optimizer)
                say("laid", iteration + 1)
                laid = 0
            if kind == "synced" and iteration % 3 == 2:
                with torch.no_grad():
                    model(torch.randn(8, 16))  # before the forward pass after this one buffers are not shared
            checkpointer.step()
            iteration += 1
            say("iteration", iteration)
            time.sleep(pause_s)
            if again and iteration % again == 0:
                checkpointer.save()
                kept = iteration
            elif kept and iteration == kept + again // 2:
                iteration = checkpointer.restore(kept)
                say("back", iteration)
                kept = 0
    say("done", resumed, digest(model, optimizer, losses))
    leave()


if __name__ == "__main__":
    parsed = dict(argument.split("=") for argument in sys.argv[5:])
    every = parsed.pop("persist_every", None)
    given: dict[str, object] = {key: int(value) if value.isdigit() else value for key, value in parsed.items()}
    if (link := given.pop("link", None)) is not None:
        setattr(Planner, "ask", asking(float(str(link))))  # noqa: B010
    if every is not None:
        given["persist_every"] = checkflow.PersistEvery(iterations=int(every))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), given)
