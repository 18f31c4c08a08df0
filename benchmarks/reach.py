"""Trainings into which hooks reach less far: what each adds to the peak, and how long it waits for copies.

    python benchmarks/reach.py [--iterations 30] [--rounds 3]

A small transformer is attached without a schedule, in every way in which people run theirs; an iteration without
checkpoints stands beside it. "learned" says whether a plan could be made; where it could not, each checkpoint is read
when its iteration ends, and what overwrites it waits. "added" is what the plan adds to the training's peak.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import overhead
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import checkflow
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.units import format_bytes

WIDTH, LAYERS, ROWS = 256, 4, 64


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the same training."""

    name: str
    make: Callable[[], checkflow.Training]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH)).to(overhead.DEVICE)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device=overhead.DEVICE)


def updated(
    loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, update: Callable[[], object] | None = None
) -> Callable[[], None]:
    """The iteration of a loss and an update."""

    def iteration() -> None:
        torch.autograd.backward(loss())
        (update or optimizer.step)()
        optimizer.zero_grad()

    return iteration


def eager(**options: bool) -> checkflow.Training:
    model, x = net(), batch()
    optimizer = adamw(model, **options)
    return checkflow.Training(model, optimizer, updated(lambda: model(x).square().mean(), optimizer))


def recomputing() -> checkflow.Training:
    model, x = net(), batch().requires_grad_()
    optimizer = adamw(model, foreach=True)

    def loss() -> torch.Tensor:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False) if len(list(block.children())) else block(y)
        return y.square().mean()

    return checkflow.Training(model, optimizer, updated(loss, optimizer))


def autocast() -> checkflow.Training:
    model, x = net(), batch()
    optimizer = adamw(model, foreach=True)

    def loss() -> torch.Tensor:
        with torch.autocast(overhead.DEVICE, dtype=torch.bfloat16):
            found: torch.Tensor = model(x).square().mean()
        return found

    return checkflow.Training(model, optimizer, updated(loss, optimizer))


def in_backward() -> checkflow.Training:
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    model, x = net(), batch()
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-4) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return checkflow.Training(
        model, tuple(optimizers.values()), lambda: torch.autograd.backward(model(x).square().mean())
    )


def compiled_model() -> checkflow.Training:
    model, x = net(), batch()
    optimizer, ran = adamw(model, foreach=True), torch.compile(model)
    return checkflow.Training(model, optimizer, updated(lambda: ran(x).square().mean(), optimizer))


def compiled_update() -> checkflow.Training:
    model, x = net(), batch()
    optimizer = adamw(model, foreach=True)
    update = torch.compile(optimizer.step)
    return checkflow.Training(model, optimizer, updated(lambda: model(x).square().mean(), optimizer, update))


WAYS = (
    Way("eager, foreach", partial(eager, foreach=True)),
    Way("eager, looped", partial(eager, foreach=False)),
    Way("eager, fused", partial(eager, fused=True)),
    Way("activation checkpointing", recomputing),
    Way("autocast", autocast),
    Way("optimizer in backward", in_backward),
    Way("compiled model", compiled_model),
    Way("compiled update", compiled_update),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30, help="measured, after what is learned")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="", help=f"of {', '.join(way.name for way in WAYS)}")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table("", "learned", "added", "anchors", "none ms", "attached ms", "ratio", "stall ms", box=None)
    for way in WAYS:
        if not chosen.ways or way.name in chosen.ways.split(","):
            table.add_row(way.name, *measured(way, chosen.iterations, chosen.rounds))
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
    Console(width=130).print(table)


def measured(way: Way, iterations: int, rounds: int) -> tuple[str, ...]:
    plain, training = way.make(), way.make()
    none_s: list[float] = []
    attached_s: list[float] = []
    ratios: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        checkflow.attach(
            training.model, training.optimizer, store=Path(folder, "store"), when_full="wait", interval=1,
            persist_every=PersistEvery(iterations=10**9), tell=lambda _: None, notify=lambda _: None,
        ) as ckpt,
    ):  # fmt: skip
        run = partial(overhead.checkpointed, training, ckpt)
        until = time.monotonic() + 60
        while ckpt.learning != "knowing" and time.monotonic() < until:
            run()
        overhead.turn(plain.iteration, 3)
        before = ckpt.stats()
        for _ in range(rounds):
            none, attached = overhead.turn(plain.iteration, iterations), overhead.turn(run, iterations)
            none_s += none
            attached_s += attached
            ratios.append(statistics.median(attached) / statistics.median(none))
        after, schedule = ckpt.stats(), ckpt.schedule
    claims, learned = schedule.certificate, after.learned_in > 0
    stall_ms = (after.stall_ns - before.stall_ns) / 1e6 / (after.iterations - before.iterations)
    return (
        "yes" if learned else "no",
        format_bytes(claims.peak_bytes - claims.training_peak_bytes) if learned else "0 B",
        str(len(schedule.anchors)),
        f"{statistics.median(none_s) * 1e3:.2f}",
        f"{statistics.median(attached_s) * 1e3:.2f}",
        f"{statistics.median(ratios):.3f}",
        f"{stall_ms:.3f}",
    )


if __name__ == "__main__":
    main()
