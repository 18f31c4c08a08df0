"""Trainings into which hooks reach less far: what each adds to the peak, and how long it waits for copies.

    python benchmarks/reach.py [--iterations 30] [--rounds 3]
    python benchmarks/reach.py --width 2048 --rows 4096 --iterations 12    # on a GPU: 1.6 GB of state, a copy of 30 ms

A small transformer is attached without a schedule, in every way in which people run theirs; an iteration without
checkpoints stands beside it. "learned" says whether a plan could be made; where it could not, each checkpoint is read
when its iteration ends, and what overwrites it waits. "added" is what the plan adds to the training's peak. On CUDA
there are rows of CUDA graphs as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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

LAYERS = 4


@dataclass(frozen=True, slots=True)
class Size:
    """How wide the network is, and how many rows a batch has."""

    width: int
    rows: int


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the same training."""

    name: str
    make: Callable[[Size], checkflow.Training]


def net(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    width = size.width
    with torch.device(overhead.DEVICE):
        blocks = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(LAYERS)
        ]
        return nn.Sequential(*blocks, nn.BatchNorm1d(width))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def batch(size: Size) -> torch.Tensor:
    return torch.randn(size.rows, size.width, device=overhead.DEVICE)


def updated(
    loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, update: Callable[[], object] | None = None
) -> Callable[[], None]:
    """The iteration of a loss and an update."""

    def iteration() -> None:
        torch.autograd.backward(loss())
        (update or optimizer.step)()
        optimizer.zero_grad()

    return iteration


def eager(size: Size, **options: bool) -> checkflow.Training:
    model, x = net(size), batch(size)
    optimizer = adamw(model, **options)
    return checkflow.Training(model, optimizer, updated(lambda: model(x).square().mean(), optimizer))


def recomputing(size: Size) -> checkflow.Training:
    model, x = net(size), batch(size).requires_grad_()
    optimizer = adamw(model, foreach=True)

    def loss() -> torch.Tensor:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False) if len(list(block.children())) else block(y)
        return y.square().mean()

    return checkflow.Training(model, optimizer, updated(loss, optimizer))


def autocast(size: Size) -> checkflow.Training:
    model, x = net(size), batch(size)
    optimizer = adamw(model, foreach=True)

    def loss() -> torch.Tensor:
        with torch.autocast(overhead.DEVICE, dtype=torch.bfloat16):
            found: torch.Tensor = model(x).square().mean()
        return found

    return checkflow.Training(model, optimizer, updated(loss, optimizer))


def in_backward(size: Size) -> checkflow.Training:
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    model, x = net(size), batch(size)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-4) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return checkflow.Training(
        model, tuple(optimizers.values()), lambda: torch.autograd.backward(model(x).square().mean())
    )


def compiled_model(size: Size) -> checkflow.Training:
    model, x = net(size), batch(size)
    optimizer, ran = adamw(model, foreach=True), torch.compile(model)
    return checkflow.Training(model, optimizer, updated(lambda: ran(x).square().mean(), optimizer))


def compiled_update(size: Size) -> checkflow.Training:
    model, x = net(size), batch(size)
    optimizer = adamw(model, foreach=True)
    update = torch.compile(optimizer.step)
    return checkflow.Training(model, optimizer, updated(lambda: model(x).square().mean(), optimizer, update))


def graphed(size: Size, *, update: bool) -> checkflow.Training:
    """A CUDA graph of the forward and backward pass, and of the update as well if so asked."""
    model, x = net(size), batch(size)
    optimizer = adamw(model, foreach=True, capturable=update)
    eagerly = updated(lambda: model(x).square().mean(), optimizer)
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            eagerly()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.autograd.backward(model(x).square().mean())
        if update:
            optimizer.step()

    def iteration() -> None:
        graph.replay()
        if not update:
            optimizer.step()

    return checkflow.Training(model, optimizer, iteration)


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
GRAPHED = (
    Way("CUDA graph of forward and backward", partial(graphed, update=False)),
    Way("CUDA graph of the iteration", partial(graphed, update=True)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30, help="measured, after what is learned")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--policy", help="by which is learned, and checkfreq copies where nothing is")
    names = [way.name for way in WAYS + GRAPHED]
    parser.add_argument("--ways", nargs="+", choices=names, metavar="WAY", default=names, help=f"of {'; '.join(names)}")
    chosen = parser.parse_args()
    size = Size(chosen.width, chosen.rows)
    warnings.simplefilter("ignore")
    table = Table("", "learned", "added", "anchors", "none ms", "attached ms", "ratio", "stall ms", box=None)
    for way in WAYS + (GRAPHED if overhead.DEVICE == "cuda" else ()):
        if way.name in chosen.ways:
            row = measured(way, size, chosen.policy, chosen.iterations, chosen.rounds)
            print(f"{way.name}: {' '.join(row)}", file=sys.stderr)
            table.add_row(way.name, *row)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
    Console(width=130).print(table)


def measured(way: Way, size: Size, policy: str | None, iterations: int, rounds: int) -> tuple[str, ...]:
    plain, training = way.make(size), way.make(size)
    none_s: list[float] = []
    attached_s: list[float] = []
    ratios: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        checkflow.attach(
            training.model, training.optimizer, store=Path(folder, "store"), when_full="wait",
            interval=1, policy=policy,
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
