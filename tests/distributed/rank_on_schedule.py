"""A training that tests compile as one of several ranks, and then run on all of them with that schedule:

    python rank_on_schedule.py KIND STORE SCHEDULE ITERATIONS

SCHEDULE has a % where the rank's number goes, STORE may have a "{rank}". It says "unwatched" and what was, "silent" and
which anchors, how many it "staged", by how many iterations it "lags" and any rank does, and "done RESUMED DIGEST" of
all that this rank has of the training.
"""

from __future__ import annotations

import sys
from itertools import count

import torch
import torch.distributed as dist
from rank_to_kill import KINDS, digest, leave, optimizer_of, say, seed

import checkflow
from checkflow.models import llama_8b

MIXED = ("tp",)  # plain parameters beside shared ones: no foreach function takes both


def training(kind: str) -> checkflow.Training:
    torch.manual_seed(0)
    if kind == "llama":
        return llama_8b.training(optimizer="adamw_foreach", small=True, sharded=True)
    model = KINDS[kind]()
    optimizer = optimizer_of(kind, model, foreach=kind not in MIXED)

    def iteration() -> None:
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


def main(kind: str, store: str, schedule: str, iterations: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    made = training(kind)
    (model,), (optimizer,) = made.models, made.optimizers
    torch.manual_seed(seed(kind, rank))
    schedule = schedule.replace("%", str(rank))
    with checkflow.attach(model, optimizer, store=store.format(rank=rank), schedule=schedule) as checkpointer:
        resumed = checkpointer.restore()
        for _ in range(resumed, iterations):
            made.iteration()
            checkpointer.step()
        say("unwatched", *checkpointer.stats().unwatched)
        say("silent", *checkpointer.stats().silent_anchors)
        say("staged", checkpointer.stats().staged)
        rulings = checkpointer._handle.rulings
        assert rulings is not None
        greatest = next(iterations for iterations in count() if not rulings._peers.any_lags_more(iterations))
        say("lags", checkpointer._engine.executor.lag, greatest)
    say("done", resumed, digest(model, optimizer, torch.zeros(())))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
