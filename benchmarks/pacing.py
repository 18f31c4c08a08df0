"""CheckFreq's Table 5 for real: others take the disk, and the interval follows what checkpoints cost, or does not.

A transformer on short sequences is trained three times, each checkpoint made durable before the next but one begins
(`slots=2`, `when_full="wait"`), so that a slow disk holds training up, as CheckFreq's single checkpoint under way does.
Alone, with `attach(overhead=P)`: the interval that it settles at. Then with that interval fixed while other processes
write to the same disk, past its cache, and with `overhead=P` while they do. Overhead is the time that training waited
for checkpoints, over the rest; "time" is the mean of an iteration's over that without checkpoints under the same
circumstances. Both are of the last half of a run.

    python benchmarks/pacing.py [--budget 0.05] [--seconds 60] [--hogs 2] [--folder .]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import overhead
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import checkflow
from checkflow import hardware
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.hardware.measure import measure_profile
from checkflow.schedule import Schedule
from checkflow.trace import trace_training

PAPER = {"alone": (14, 0.05), "fixed": (14, 0.35), "following": (19, 0.05)}  # interval, overhead: CheckFreq's Table 5
HOG = """
import mmap, os, sys
block = mmap.mmap(-1, 32 << 20)
block.write(os.urandom(32 << 20))
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
while True:
    for number in range(8):
        os.pwrite(file, block, number << 25)
    os.fsync(file)
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """Of the last half of a run."""

    interval: float  # iterations, the mean
    overhead: float  # a fraction of the time without waiting
    iteration_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--hogs", type=int, default=2, help="processes that write to the same disk")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be written to")
    chosen = parser.parse_args()
    if overhead.DEVICE == "cpu" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | overhead.KEEP_MEMORY)
    schedule = planned()
    alone_s = statistics.mean(times_of(training(), chosen.seconds / 4))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        there = Path(folder)
        alone = kept(schedule, there / "alone", chosen.seconds, budget=chosen.budget)
        with hogs(chosen.hogs, there):
            beside_s = statistics.mean(times_of(training(), chosen.seconds / 4))
            fixed = kept(schedule, there / "fixed", chosen.seconds, interval=max(1, round(alone.interval)))
            following = kept(schedule, there / "following", chosen.seconds, budget=chosen.budget)
    table = Table("run", "interval", "overhead", "time", "paper's interval", "paper's overhead", box=None)
    for name, found in {"alone": alone, "fixed": fixed, "following": following}.items():
        interval, share = PAPER[name]
        plain_s = alone_s if found is alone else beside_s
        table.add_row(
            name, f"{found.interval:.1f}", f"{found.overhead:.1%}", f"{found.iteration_s / plain_s:.2f}",
            str(interval), f"{share:.0%}",
        )  # fmt: skip
    Console(width=120).print(table)
    print(
        f"{alone_s * 1e3:.0f} ms an iteration without checkpoints, {beside_s * 1e3:.0f} beside the other processes; "
        f"{schedule.state_bytes / 1e6:.0f} MB of state"
    )


def training() -> checkflow.Training:
    """19 M parameters with AdamW, and little to compute: 227 MB of state."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(1, 32, 512)

    def iteration() -> None:
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


def planned() -> Schedule:
    """At each iteration, on the link that there is."""
    link_bytes_per_s = hardware.link_bytes_per_s(measure_profile("here", overhead.DEVICE))
    with torch.device(overhead.DEVICE):
        graph = trace_training(training, model="short sequences", measure=True).graph
    compiled = compile_graph(graph, Options(link_bytes_per_s))
    assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
    return compiled.schedule


def kept(
    schedule: Schedule, store: Path, seconds: float, *, budget: float | None = None, interval: int | None = None
) -> Kept:
    """What a run of so many seconds settles at."""
    made = training()
    with checkflow.attach(
        made.model, made.optimizer, schedule=schedule, store=store, slots=2, when_full="wait",
        persist_every=checkflow.PersistEvery(iterations=1), overhead=budget, interval=interval, tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        times_of(made, seconds / 2, ckpt)
        before = ckpt.stats()
        times = times_of(made, seconds / 2, ckpt)
        after = ckpt.stats()
    waited_s = (sum(after.stall_ns_by_cause.values()) - sum(before.stall_ns_by_cause.values())) / 1e9
    started = after.started - before.started
    return Kept(len(times) / max(1, started), waited_s / (sum(times) - waited_s), statistics.mean(times))


def times_of(made: checkflow.Training, seconds: float, ckpt: checkflow.Checkpointer | None = None) -> list[float]:
    """Of iterations, for so long."""
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        made.iteration()
        if ckpt is not None:
            ckpt.step()
        times.append(time.perf_counter() - began)
    return times


@contextmanager
def hogs(count: int, folder: Path) -> Iterator[None]:
    """Processes that write to the disk and wait for it, again and again."""
    with ExitStack() as ends:
        for number in range(count):
            process = ends.enter_context(subprocess.Popen([sys.executable, "-c", HOG, str(folder / f"hog-{number}")]))
            ends.callback(process.kill)
        yield


if __name__ == "__main__":
    main()
