"""Iteration time with a checkpoint at every iteration against none, interleaved in one process.

One training; blocks of iterations alternate between attached and not. Beside the ratio: what the copies alone predict,
that is the state's bytes over the measured copy bandwidth when they take the training's own cores (CPU), or the
snapshots' copies on the compute stream (CUDA). Times are of whole iterations, medians over all blocks.

    python benchmarks/overhead.py [--models small,gpt2] [--blocks 6] [--iterations 10] [--persist-every N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import checkflow
from checkflow import hardware, models
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.runtime.stats import Stats
from checkflow.store.pace import PersistEvery
from checkflow.trace import trace_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"width": 256, "layers": 4, "tokens": 128, "batch": 8}


def small_transformer() -> checkflow.Training:
    """A small transformer with AdamW: 3.2 M parameters, 38 MB of state."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SMALL["width"], 4, 4 * SMALL["width"], dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, SMALL["layers"], enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(SMALL["batch"], SMALL["tokens"], SMALL["width"])

    def iteration() -> None:
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


def factory_of(name: str) -> Callable[[], checkflow.Training]:
    if name == "small":
        return small_transformer
    batch = 8 if DEVICE == "cuda" else 1
    return partial(models.factory(name), batch_size=batch, optimizer="adamw_foreach", sequence_length=256)


@dataclass(frozen=True, slots=True)
class Figures:
    plain_s: list[float]
    attached_s: list[float]
    stats: Stats
    state_bytes: int
    snapshot_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,gpt2")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    parser.add_argument("--iterations", type=int, default=10, help="in each block")
    parser.add_argument("--persist-every", type=int, default=10**9, help="iterations; the default leaves the disk out")
    chosen = parser.parse_args()
    profile = hardware.measure_profile("here", DEVICE)
    table = Table("model", "state MB", "none ms", "attached ms", "ratio", "p99 ratio", "predicted", "stall", box=None)
    for name in chosen.models.split(","):
        figures = measure(factory_of(name), profile, chosen.blocks, chosen.iterations, chosen.persist_every)
        plain, attached = statistics.median(figures.plain_s), statistics.median(figures.attached_s)
        moved = figures.state_bytes if DEVICE == "cpu" else 0
        predicted = moved / profile.link_bandwidth_bytes_per_s
        predicted += 2 * figures.snapshot_bytes / profile.memory_bandwidth_bytes_per_s
        table.add_row(
            name,
            f"{figures.state_bytes / 1e6:.0f}",
            f"{plain * 1e3:.1f}",
            f"{attached * 1e3:.1f}",
            f"{attached / plain:.4f}",
            f"{_p99(figures.attached_s) / _p99(figures.plain_s):.3f}",
            f"{1 + predicted / plain:.4f}",
            f"{figures.stats.stall_per_iteration_ns / 1e6:.2f} ms: {_causes(figures.stats)}",
        )
        if figures.measured_peak_bytes is not None:
            ratio = figures.measured_peak_bytes / figures.predicted_peak_bytes
            print(f"{name}: measured GPU peak over predicted {ratio:.3f}")
    Console(width=170).print(table)


def _causes(stats: Stats) -> str:
    return ", ".join(f"{cause} {ns / 1e6:.0f} ms" for cause, ns in stats.stall_ns_by_cause.items() if ns) or "none"


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def measure(
    factory: Callable[[], checkflow.Training],
    profile: hardware.Profile,
    blocks: int,
    iterations: int,
    persist_every: int,
) -> Figures:
    """Train one model, attached and not in turn."""
    with torch.device(DEVICE):
        traced = trace_training(factory, model="benchmark", measure=True)
        training = factory()
    graph = traced.graph
    compiled = compile_graph(graph, Options(hardware.link_bytes_per_s(profile), interval=1))
    assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
    plain: list[float] = []
    attached: list[float] = []
    stats = None
    training.iteration()
    for block in range(blocks):
        _block(training.iteration, iterations, plain if block else [])
        with (
            tempfile.TemporaryDirectory() as folder,
            checkflow.attach(
                training.model,
                training.optimizer,
                schedule=compiled.schedule,
                store=Path(folder, "store"),
                policy="block",
                persist_every=PersistEvery(iterations=persist_every),
            ) as ckpt,
        ):
            _block(partial(_attached_iteration, training, ckpt), iterations, attached if block else [])
            stats = ckpt.stats()
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    certificate = compiled.schedule.certificate
    assert stats is not None
    return Figures(
        plain,
        attached,
        stats,
        compiled.problem.state_bytes,
        certificate.executed_snapshot_bytes,
        certificate.executed_peak_bytes,
        peak,
    )


def _attached_iteration(training: checkflow.Training, ckpt: Checkpointer) -> None:
    training.iteration()
    ckpt.step()


def _block(iteration: Callable[[], object], count: int, times_s: list[float]) -> None:
    for number in range(count + 2):
        began = time.perf_counter()
        iteration()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if number >= 2:  # the first of a block warm its caches up
            times_s.append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
