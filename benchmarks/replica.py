"""What the host takes to bring a replica an iteration on, beside a plain copy of as many bytes of state.

A training whose policy is lowdiff_plus stages one delta after the other; its own process for the replica is ended, and
the steps that this would make are made and timed here, with nothing beside them. The ratio is of medians; twice that is
how often each byte passes through host memory, for a copy reads and writes it.

    python benchmarks/replica.py [--models small,gpt2] [--steps 7]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import overhead
import torch
from rich.console import Console
from rich.table import Table

import checkflow
from checkflow.hardware.roofline import UPDATE_PASSES
from checkflow.replica.update import Replica
from checkflow.store.memory.replica_slots import made, next_step
from checkflow.store.memory.shared_memory import SharedMemory

HEADINGS = ("model", "state MB", "iteration ms", "step ms", "copy ms", "step / copy", "passes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="small,gpt2", help="of small, gpt2")
    parser.add_argument("--steps", type=int, default=7)
    chosen = parser.parse_args()
    table = Table(*HEADINGS, box=None)
    for model in chosen.models.split(","):
        table.add_row(model, *row(model, chosen.steps))
    console = Console(width=120)
    console.print(table)
    console.print(f"`compile --policy auto` takes {UPDATE_PASSES} passes.")


def row(model: str, steps: int) -> list[str]:
    """Megabytes of state, milliseconds of an iteration, a step and a copy, and the ratio of these two."""
    training = overhead.factory_of(model)()
    print(f"{model}: compiling", file=sys.stderr)
    schedule = checkflow.compile(training, policy="lowdiff_plus", device="measure", bandwidth="1TB/s")
    with tempfile.TemporaryDirectory() as folder:
        attached = checkflow.attach(
            training.model, training.optimizer, schedule=schedule, store=Path(folder, "store"), tell=lambda _: None
        )
        alone(attached)
        shared = attached._handle.shared
        replica, times_s, iterations_s = Replica(shared), list[float](), list[float]()
        while len(times_s) < steps:
            iterations_s.append(overhead.timed_s(training.iteration))
            attached.step()
            attached._engine.executor.drain()
            step = next_step(shared)
            if step is not None:
                print(f"{model}: step {len(times_s) + 1} of {steps}", file=sys.stderr)
                began = time.perf_counter()
                iteration, record = replica.advance(step)
                times_s.append(time.perf_counter() - began)
                made(shared, step, iteration, record)
        copy_s = copied_s(shared, steps)
        attached.close()
    step_s = statistics.median(times_s)
    figures = (schedule.state_bytes / 1e6, 1e3 * statistics.median(iterations_s), 1e3 * step_s, 1e3 * copy_s)
    return [*(f"{figure:.1f}" for figure in figures), f"{step_s / copy_s:.2f}", f"{2 * step_s / copy_s:.1f}"]


def alone(attached: checkflow.Checkpointer) -> None:
    """No other process makes the steps, and the slots, which are sealed for the training, may be written here."""
    replica, shared = attached._handle._saver.replica, attached._handle.shared
    assert replica is not None
    os.kill(replica.pid, signal.SIGKILL)
    replica.tend = lambda: None  # type: ignore[method-assign]
    shared.seal = lambda slot: None  # type: ignore[method-assign]  # noqa: ARG005


def copied_s(shared: SharedMemory, rounds: int) -> float:
    """From one whole slot to another."""
    source, target = (torch.frombuffer(shared.slot_bytes(slot), dtype=torch.uint8) for slot in (0, 2))
    times_s = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s)


if __name__ == "__main__":
    main()
