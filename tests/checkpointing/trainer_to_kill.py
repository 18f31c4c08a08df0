"""A small training with everything random in it, run as a process of its own to be killed.

    python trainer_to_kill.py reference DEVICE ITERATIONS
    python trainer_to_kill.py attached DEVICE ITERATIONS SCHEDULE STORE SLOTS
    python trainer_to_kill.py learning DEVICE ITERATIONS SCHEDULE STORE SLOTS

Where SCHEDULE is "learned" there is none; where it is a policy's name it is learned by that, on a link that is too slow
to carry the state in one iteration; "learning" waits until it is.

Prints "at I DIGEST" for each state that a checkpoint may hold: of iteration I when it is completed, and once when
restored. The digest covers weights, buffers, optimizer state, the scheduler, and what the random generators give next.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import checkflow
from checkflow.data import ResumableLoader
from checkflow.learning.messages import POLICIES
from checkflow.learning.planner import Planner


def build(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256), nn.Linear(256, 8)
    ).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def training(device: str = "cpu") -> checkflow.Training:
    model, optimizer = build(device)
    x, y = torch.randn(16, 32, device=device), torch.randint(8, (16,), device=device)
    return checkflow.Training(model, optimizer, lambda: train(model, optimizer, x, y))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> str:
    content = hashlib.sha256()
    slots = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    generators = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    for tensor in (*model.state_dict().values(), *slots, *generators):
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    content.update(json.dumps([scheduler.last_epoch, scheduler.get_last_lr()]).encode())
    return content.hexdigest()


def batches() -> ResumableLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(70, 32, generator=generator), torch.randint(8, (70,), generator=generator))
    return ResumableLoader(dataset, batch_size=16, shuffle=True, seed=2)


def endless(
    loader: ResumableLoader[tuple[torch.Tensor, ...]], device: str = "cpu"
) -> Iterator[tuple[torch.Tensor, ...]]:
    while True:
        for batch in loader:
            yield tuple(tensor.to(device) for tensor in batch)


def main(mode: str, device: str, iterations: int, schedule: str = "", store: str = "", slots: str = "3") -> None:
    torch.set_num_threads(1)
    model, optimizer = build(device)
    loader = batches()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)

    def say(iteration: int) -> None:
        print(f"at {iteration} {digest(model, optimizer, scheduler)}", flush=True)  # noqa: T201

    endlessly = endless(loader, device)
    if mode == "reference":
        for i in range(iterations):
            train(model, optimizer, *next(endlessly))
            scheduler.step()
            say(i + 1)
        return
    policy = schedule if schedule in POLICIES else None
    if policy is not None:
        from slow_link import asking  # what tortures this trainer has no such neighbour

        setattr(Planner, "ask", asking(0.6))  # noqa: B010
    learned = policy is not None or schedule == "learned"
    with checkflow.attach(
        model, optimizer, store=store, schedule=None if learned else schedule, scheduler=scheduler,
        loader=loader, when_full="wait", slots=int(slots), notify=partial(print, file=sys.stderr), policy=policy,
        interval=1 if schedule == "learned" else None,  # what is learned may be of more, where the link was slow
    ) as ckpt:  # fmt: skip
        first = ckpt.restore()
        say(first)
        for i in range(first, iterations):
            train(model, optimizer, *next(endlessly))
            scheduler.step()
            ckpt.step()
            say(i + 1)
            while mode == "learning" and ckpt.learning == "planning":
                time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
