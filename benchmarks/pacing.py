"""CheckFreq's Table 5 for real: others take the disk, and the interval follows what checkpoints cost, or does not.

A small transformer is trained three times, each checkpoint made durable before the next but one begins (`slots=2`,
`when_full="wait"`), so that a slow disk holds training up, as CheckFreq's single checkpoint under way does. Alone, with
`attach(overhead=P)`: the interval that it settles at. Then with that interval fixed while other processes write to
the same disk, and with `overhead=P` while they do. Overhead is the time that training waited for checkpoints, over the
rest; "time" is the median of an iteration's over that without checkpoints. Both are of the last half of a run.

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

import checkflow
from checkflow import hardware
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.hardware.measure import measure_profile
from checkflow.schedule import Schedule
from checkflow.trace import trace_training

PAPER = {"alone": (14, 0.05), "fixed": (14, 0.35), "following": (19, 0.05)}  # interval, overhead: CheckFreq's Table 5
HOG = """
import os, sys
block = os.urandom(32 << 20)
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(4):
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
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
    plain_s = statistics.median(times_of(overhead.small_transformer(), chosen.seconds / 4))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        there = Path(folder)
        alone = kept(schedule, there / "alone", chosen.seconds, budget=chosen.budget)
        with hogs(chosen.hogs, there):
            fixed = kept(schedule, there / "fixed", chosen.seconds, interval=max(1, round(alone.interval)))
            following = kept(schedule, there / "following", chosen.seconds, budget=chosen.budget)
    table = Table("run", "interval", "overhead", "time", "paper's interval", "paper's overhead", box=None)
    for name, found in {"alone": alone, "fixed": fixed, "following": following}.items():
        interval, share = PAPER[name]
        table.add_row(
            name, f"{found.interval:.1f}", f"{found.overhead:.1%}", f"{found.iteration_s / plain_s:.2f}",
            str(interval), f"{share:.0%}",
        )  # fmt: skip
    Console(width=120).print(table)
    print(f"{plain_s * 1e3:.0f} ms an iteration without checkpoints, {schedule.state_bytes / 1e6:.0f} MB of state")


def planned() -> Schedule:
    """At each iteration, on the link that there is."""
    link_bytes_per_s = hardware.link_bytes_per_s(measure_profile("here", overhead.DEVICE))
    with torch.device(overhead.DEVICE):
        graph = trace_training(overhead.small_transformer, model="small", measure=True).graph
    compiled = compile_graph(graph, Options(link_bytes_per_s))
    assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
    return compiled.schedule


def kept(
    schedule: Schedule, store: Path, seconds: float, *, budget: float | None = None, interval: int | None = None
) -> Kept:
    """What a run of so many seconds settles at."""
    training = overhead.small_transformer()
    with checkflow.attach(
        training.model, training.optimizer, schedule=schedule, store=store, slots=2, when_full="wait",
        persist_every=checkflow.PersistEvery(iterations=1), overhead=budget, interval=interval, tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        times_of(training, seconds / 2, ckpt)
        before = ckpt.stats()
        times = times_of(training, seconds / 2, ckpt)
        after = ckpt.stats()
    waited_s = (sum(after.stall_ns_by_cause.values()) - sum(before.stall_ns_by_cause.values())) / 1e9
    started = after.started - before.started
    return Kept(len(times) / max(1, started), waited_s / (sum(times) - waited_s), statistics.median(times))


def times_of(training: checkflow.Training, seconds: float, ckpt: checkflow.Checkpointer | None = None) -> list[float]:
    """Of iterations, for so long."""
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        training.iteration()
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
