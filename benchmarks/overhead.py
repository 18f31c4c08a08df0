"""Iteration time with a checkpoint at every iteration against none, interleaved in one process.

Two trainings of the same model, one attached and one not, take turns of a few iterations; the first of each turn is
left out, and the ratio is the median over pairs of neighbouring turns, so that a machine whose clock drifts slows both
sides. The same two took turns before one was attached: that ratio ("alike") is what the machine makes of equal things,
such as where their memory lies. Beside the ratio: what the copies alone predict, that is the state's bytes over the
measured copy bandwidth when they take the training's own cores (CPU), or the snapshots' copies on the compute stream
(CUDA).

On a CPU, glibc returns every large block to the kernel when it is freed: half a second of GPT-2's iteration are page
faults, whose cost in a virtual machine swings with what else memory is used for. Both sides therefore run with an
allocator that keeps its memory; `--keep-allocator` leaves glibc as it is.

    python benchmarks/overhead.py [--models small,gpt2] [--pairs 12] [--iterations 3] [--persist-every N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import checkflow
from checkflow import hardware, models
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.hardware.measure import measure_profile
from checkflow.runtime.stats import Stats
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace import trace_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
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
class Turns:
    """Times of iterations, one list for each turn; turns of the two sides alternate."""

    plain_s: list[list[float]]
    attached_s: list[list[float]]

    def ratio(self) -> float:
        """Attached over plain: the median of neighbouring turns' ratios."""
        pairs = zip(self.attached_s, self.plain_s, strict=True)
        return statistics.median(statistics.median(attached) / statistics.median(plain) for attached, plain in pairs)

    def p99_ratio(self) -> float:
        return _p99(_flat(self.attached_s)) / _p99(_flat(self.plain_s))


@dataclass(frozen=True, slots=True)
class Figures:
    turns: Turns
    alike: float  # ratio of the two trainings with neither attached
    stats: Stats
    hook_ns: int  # of one iteration, on the host: not all of it is waited for on CUDA
    state_bytes: int
    snapshot_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None

    def predicted_s(self, profile: hardware.Profile) -> float:
        """What the copies take from the training, in seconds for each iteration."""
        moved = self.state_bytes if DEVICE == "cpu" else 0
        copied = 2 * self.snapshot_bytes / profile.memory_bandwidth_bytes_per_s
        return moved / profile.link_bandwidth_bytes_per_s + copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,gpt2")
    parser.add_argument("--pairs", type=int, default=12, help="of turns")
    parser.add_argument("--iterations", type=int, default=3, help="measured in each turn, after one that is not")
    parser.add_argument("--persist-every", type=int, default=10**9, help="iterations; the default leaves the disk out")
    parser.add_argument("--keep-allocator", action="store_true", help="as glibc is")
    chosen = parser.parse_args()
    if DEVICE == "cpu" and not chosen.keep_allocator and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    profile = measure_profile("here", DEVICE)
    link_bytes_per_s = hardware.link_bytes_per_s(profile)
    times = "none ms", "attached ms", "alike", "ratio", "p99 ratio"
    table = Table("model", "state MB", *times, "predicted", "hooks", "stall", box=None)
    for name in chosen.models.split(","):
        figures = measure(factory_of(name), link_bytes_per_s, chosen.pairs, chosen.iterations, chosen.persist_every)
        plain, attached = (statistics.median(_flat(side)) for side in (figures.turns.plain_s, figures.turns.attached_s))
        table.add_row(
            name,
            f"{figures.state_bytes / 1e6:.0f}",
            f"{plain * 1e3:.1f}",
            f"{attached * 1e3:.1f}",
            f"{figures.alike:.4f}",
            f"{figures.turns.ratio():.4f}",
            f"{figures.turns.p99_ratio():.3f}",
            f"{1 + figures.predicted_s(profile) / plain:.4f}",
            f"{figures.hook_ns / 1e6:.2f} ms",
            f"{figures.stats.stall_per_iteration_ns / 1e6:.2f} ms: {_causes(figures.stats)}",
        )
        if figures.measured_peak_bytes is not None:
            ratio = figures.measured_peak_bytes / figures.predicted_peak_bytes
            print(f"{name}: measured GPU peak over predicted {ratio:.3f}")
    Console(width=170).print(table)


def _causes(stats: Stats) -> str:
    return ", ".join(f"{cause} {ns / 1e6:.0f} ms" for cause, ns in stats.stall_ns_by_cause.items() if ns) or "none"


def _flat(turns: list[list[float]]) -> list[float]:
    return list(chain.from_iterable(turns))


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def measure(
    factory: Callable[[], checkflow.Training],
    link_bytes_per_s: int,
    pairs: int,
    iterations: int,
    persist_every: int,
) -> Figures:
    """Train a model twice, attached and not, in turns."""
    with torch.device(DEVICE):
        traced = trace_training(factory, model="benchmark", measure=True)
        plain = factory()
        plain.iteration()
        held = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        training = factory()
    compiled = compile_graph(traced.graph, Options(link_bytes_per_s, interval=1))
    assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
    training.iteration()
    alike, turns = Turns([], []), Turns([], [])
    for _ in range(pairs):
        alike.plain_s.append(turn(plain.iteration, iterations))
        alike.attached_s.append(turn(training.iteration, iterations))
    peak = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        checkflow.attach(
            training.model,
            training.optimizer,
            schedule=compiled.schedule,
            store=Path(folder, "store"),
            when_full="wait",
            persist_every=PersistEvery(iterations=persist_every),
        ) as ckpt,
    ):
        attached = partial(checkpointed, training, ckpt)
        turn(attached, 3)  # each slot's memory is touched for the first time
        before = ckpt.stats()
        for _ in range(pairs):
            turns.plain_s.append(turn(plain.iteration, iterations))
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            turns.attached_s.append(turn(attached, iterations))
            if DEVICE == "cuda":
                peak = max(peak, torch.cuda.max_memory_allocated() - held)
        stats = ckpt.stats()
    certificate = compiled.schedule.certificate
    return Figures(
        turns,
        alike.ratio(),
        stats,
        (stats.hook_ns - before.hook_ns) // (stats.iterations - before.iterations),
        compiled.problem.state_bytes,
        certificate.snapshot_bytes,
        certificate.peak_bytes,
        peak or None,
    )


def checkpointed(training: checkflow.Training, ckpt: Checkpointer) -> None:
    """One iteration and its end."""
    training.iteration()
    ckpt.step()


def turn(iteration: Callable[[], object], count: int) -> list[float]:
    """Seconds of so many iterations, after one that is not measured."""
    return [timed_s(iteration) for _ in range(count + 1)][1:]


def timed_s(iteration: Callable[[], object]) -> float:
    """How long one takes."""
    began = time.perf_counter()
    iteration()
    if DEVICE == "cuda":  # as a training that reads its loss: copies to the host go on
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
