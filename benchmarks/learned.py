"""A schedule that is learned while training runs, beside one that was compiled ahead, and beside no checkpoints at all.

Three trainings of the same model take turns, from their first iteration on, in an order that rotates: neither of the
two that are attached has a kept schedule. Shown are the first iterations, each as a multiple of the same one without
checkpoints; the median of later ones; and what the two schedules say of an iteration.

    python benchmarks/learned.py [--models small,gpt2] [--rounds 5] [--iterations 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
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
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace import trace_training

SIDES = ("none", "ahead", "learned")


@dataclass(frozen=True, slots=True)
class Said:
    """What a schedule says of an iteration."""

    operators: int
    peak_bytes: int
    training_peak_bytes: int
    iteration_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    model: str
    rounds: int
    times_s: dict[str, list[list[float]]]  # side -> of each round, of each iteration
    recorded_in: int  # iteration
    learned_in: list[int]  # of each round, the iteration from whose checkpoint on the plan is followed
    stall_ms: dict[str, float]  # an iteration, of the last round
    ahead: Said
    learned: Said

    def ratio(self, side: str, first: int, last: int | None = None) -> float:
        """Median over rounds and iterations of a side's time over that of none, of iterations first..last from 1."""
        pairs = (
            zip(mine[first - 1 : last], none[first - 1 : last], strict=True)
            for mine, none in zip(self.times_s[side], self.times_s["none"], strict=True)
        )
        return statistics.median(one / other for pair in pairs for one, other in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if overhead.DEVICE == "cpu" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | overhead.KEEP_MEMORY)
    profile = measure_profile("here", overhead.DEVICE)
    found = [measure(name, profile, chosen.rounds, chosen.iterations) for name in chosen.models.split(",")]
    for figures in found:
        show(figures, Console(width=120))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(figures) for figures in found]))


def measure(name: str, profile: hardware.Profile, rounds: int, iterations: int) -> Figures:
    factory = overhead.factory_of(name)
    with torch.device(overhead.DEVICE):
        traced = trace_training(factory, model=name, measure=True)
    compiled = compile_graph(traced.graph, Options(hardware.link_bytes_per_s(profile), interval=1))
    assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
    times: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    learned_in: list[int] = []
    recorded_in = 0
    stalls: dict[str, float] = {}
    schedule: Schedule | None = None
    for number in range(rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            with torch.device(overhead.DEVICE):
                training = factory()
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                ckpt, run = None, training.iteration
                if side != "none":
                    given = compiled.schedule if side == "ahead" else None
                    ckpt = stack.enter_context(_attached(training, Path(folder, "store"), given))
                    run = partial(overhead.checkpointed, training, ckpt)
                series = []
                for iteration in range(iterations):
                    series.append(overhead.timed_s(run))
                    if not recorded_in and ckpt is not None and ckpt.learning == "planning":
                        recorded_in = iteration + 1
                times[side].append(series)
                if ckpt is not None:
                    stalls[side] = ckpt.stats().stall_per_iteration_ns / 1e6
                if side == "learned" and ckpt is not None:
                    learned_in.append(ckpt.stats().learned_in)
                    schedule = ckpt.schedule
    assert schedule is not None and all(learned_in), f"no schedule was learned in {iterations} iterations"
    return Figures(
        name, rounds, times, recorded_in, learned_in, stalls, _said(compiled.schedule), _said(schedule)
    )  # fmt: skip


def _attached(training: checkflow.Training, store: Path, schedule: Schedule | None) -> checkflow.Checkpointer:
    return checkflow.attach(
        training.model,
        training.optimizer,
        store=store,
        schedule=schedule,
        interval=1,
        when_full="wait",
        persist_every=PersistEvery(iterations=10**9),
        tell=lambda _: None,
    )


def _said(schedule: Schedule) -> Said:
    claims = schedule.certificate
    return Said(
        schedule.steps, claims.peak_bytes, claims.training_peak_bytes, schedule.iteration_time_ns / 1e6
    )  # fmt: skip


def show(figures: Figures, console: Console) -> None:
    none_ms = statistics.median(time_s for series in figures.times_s["none"] for time_s in series[3:]) * 1e3
    late = max(20, *figures.learned_in)
    table = Table("", "ahead", "learned", title=f"{figures.model}: {none_ms:.1f} ms without checkpoints", box=None)
    for number in range(1, 11):
        mark = " (recorded)" if number == figures.recorded_in else ""
        ratios = (f"{figures.ratio(side, number, number):.3f}" for side in SIDES[1:])
        table.add_row(f"iteration {number}{mark}", *ratios)
    for label, first, last in (("iterations 11 to 20", 11, 20), (f"iterations {late + 1} on", late + 1, None)):
        table.add_row(label, *(f"{figures.ratio(side, first, last):.3f}" for side in SIDES[1:]))
    table.add_row("stall of an iteration, ms", *(f"{figures.stall_ms[side]:.2f}" for side in SIDES[1:]))
    one, other = figures.ahead, figures.learned
    table.add_row("operators", str(one.operators), str(other.operators))
    table.add_row("training peak, bytes", str(one.training_peak_bytes), str(other.training_peak_bytes))
    table.add_row("peak, bytes", str(one.peak_bytes), str(other.peak_bytes))
    table.add_row("its time, ms", f"{one.iteration_ms:.1f}", f"{other.iteration_ms:.1f}")
    table.add_row("followed from iteration", "1", ", ".join(map(str, figures.learned_in)))
    console.print(table)


if __name__ == "__main__":
    main()
