"""A rank whose ZeroRedundancyOptimizer is checkpointed by random schedules, and copies that run as late as they may:

    python rank_to_tear.py KIND DISARMED

It says "torn N", of how many staged tensors that were not as they were when their iteration ended, and "staged N".
DISARMED is a kind of guard that does nothing, or "none".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from rank_to_kill import leave, say
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torn import Case, random_schedule, rig

from checkflow.runtime.guards import GuardKind
from checkflow.training import Training
from checkflow.wrapped import received

SEEDS, ITERATIONS = 3, 8
SETTINGS: dict[str, dict[str, object]] = {
    "foreach": {"foreach": True},
    "looped": {"foreach": False},
    "fused": {"fused": True},
    "views": {"foreach": True, "parameters_as_bucket_view": True},
    "closed": {"fused": True},
    "thawing": {"fused": True, "weight_decay": 0.0},
}
"""The update is given a closure; gradients of what others update are let go before it, and rates begin with 0."""


def case_of(kind: str) -> Case:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5), torch.nn.Linear(5, 2))
    model[2].bias.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    groups = [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:], "lr": 3e-3}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2, **SETTINGS[kind])  # type: ignore[arg-type]

    def again(number: int) -> float:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        loss = ddp(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        return float(loss.detach())

    def iterate(number: int) -> None:
        if kind == "closed":
            optimizer.step(lambda: again(number))
            return
        again(number)
        if kind == "thawing":
            for parameter in received(optimizer):
                parameter.grad = None
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 if number > 2 else 0.0
        optimizer.step()

    return Case(Training(model, optimizer, lambda: None), iterate)


def main(kind: str, disarmed: frozenset[GuardKind]) -> None:
    dist.init_process_group("gloo")
    torn = staged = 0
    for lag in (0, 3, 10**9):
        for seed in range(SEEDS):
            schedule = random_schedule(lambda: case_of(kind), seed, snapshots=0.3 if seed else 0.0)
            made = rig(lambda: case_of(kind), schedule, lag=lag, disarmed=disarmed)
            made.run(ITERATIONS)
            made.close()
            torn += len(made.torn())
            staged += len(made.sink.order)
    say("torn", torn)
    say("staged", staged)
    leave()


if __name__ == "__main__":
    main(sys.argv[1], frozenset() if sys.argv[2] == "none" else frozenset({GuardKind(sys.argv[2])}))
