"""A rank whose ZeroRedundancyOptimizer is unusual: python rank_with_zero.py KIND STORE ITERATIONS

It says "done RESUMED DIGEST" of what this rank has, and "lr" and those of its groups.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from rank_to_kill import digest, leave, say
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import checkflow


class Nesting(torch.optim.Optimizer):
    """Its state is in a dict within a dict."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter].setdefault("kept", {"sum": torch.zeros_like(parameter)})
                    kept["sum"].add_(parameter.grad)
                    parameter.sub_(group["lr"] * kept["sum"])


def made(kind: str) -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    """`few`: fewer parameters than ranks; `plain`: no tensor is kept of any; `tensor`: the rate is one; `pairs`: each
    two ranks train a model of their own; `buckets`, `freezing`, `thawing`: parameters are views, one of which `turns`.
    """
    model = torch.nn.Linear(16, 4)
    group = dist.new_subgroups(2)[0] if kind == "pairs" else None  # type: ignore[no-untyped-call]
    if kind == "pairs":
        torch.manual_seed(dist.get_rank() // 2)
    if kind not in ("few", "plain"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))  # type: ignore[assignment]
    views = kind in ("buckets", "freezing", "thawing")
    if views:
        layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5), torch.nn.Linear(5, 2)]
        model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool1d(6), *layers)  # type: ignore[assignment]
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    of = {"plain": torch.optim.SGD, "nested": Nesting}.get(kind, torch.optim.Adam)
    lr = torch.tensor(0.01) if kind == "tensor" else 0.01
    return ddp, ZeroRedundancyOptimizer(
        ddp.parameters(), of, process_group=group, parameters_as_bucket_view=views, lr=lr
    )


def turns(kind: str, model: torch.nn.Module, iteration: int) -> None:
    """A bias is trained in some iterations only; it goes into a bucket then, and out of it."""
    if kind in ("freezing", "thawing"):
        model.get_parameter("module.3.bias").requires_grad_((iteration >= 2) == (kind == "thawing"))


def main(kind: str, store: str, iterations: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer = made(kind)
    torch.manual_seed(100 + dist.get_rank())
    with checkflow.attach(model, optimizer, store=store) as checkpointer:
        resumed = checkpointer.restore()
        for iteration in range(resumed, iterations):
            turns(kind, model, iteration)
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                if kind == "tensor":
                    group["lr"].mul_(0.9)
                else:
                    group["lr"] *= 0.9
            checkpointer.step()
    say("lr", *(float(group["lr"]) for group in optimizer.param_groups))
    say("done", resumed, digest(model, optimizer, torch.zeros(())))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
