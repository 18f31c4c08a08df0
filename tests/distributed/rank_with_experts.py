"""A rank with layers of its own beside one that all have alike:

    python rank_with_experts.py KIND STORE ITERATIONS [FROM]

Of KIND "experts" each rank's layer differs under the same name, and rank 1 alone has one more; "named" is without that
one; "alike" has the same on all, though each rank saves it. FROM: the iteration that is restored. It says "told LINE"
of what it is told, "expert ITERATION DIGEST" of what is restored, and "done".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from rank_to_kill import leave, say
from torch.nn.parallel import DistributedDataParallel

import checkflow


class Experts(torch.nn.Module):
    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        trunk = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.trunk = DistributedDataParallel(trunk) if kind != "alike" else trunk
        torch.manual_seed(1 if kind == "alike" else 10 + rank)
        self.expert = torch.nn.Linear(4, 4)
        self.only = torch.nn.Linear(4, 4) if kind == "experts" and rank == 1 else torch.nn.Identity()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.only(self.expert(self.trunk(batch)))
        return found


def main(kind: str, store: str, iterations: str, chosen: str = "") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Experts(kind, rank)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.Generator().manual_seed(0 if kind == "alike" else rank)
    with checkflow.attach(
        model, optimizer, store=store, when_full="wait", generators={"batches": batches}, tell=lambda _: None,
        notify=lambda line: say("told", line),
    ) as checkpointer:  # fmt: skip
        resumed = checkpointer.restore(int(chosen) if chosen else None)
        say("expert", resumed, float(model.expert.weight.sum()))
        for _ in range(resumed, int(iterations)):
            torch.autograd.backward(model(torch.randn(8, 4, generator=batches)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    say("done")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
