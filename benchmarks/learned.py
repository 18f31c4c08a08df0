"""A schedule that is learned while training runs, beside one that was compiled ahead, and beside no checkpoints at all.

Three trainings of the same model take turns, from their first iteration on, in an order that rotates: neither of the
two that are attached has a kept schedule. Shown are the first iterations, each as a multiple of the same one without
checkpoints, and what the two schedules say of an iteration. Then the three go on beside each other, a few iterations at
a time, so that a machine whose clock drifts slows all of them; a fourth without checkpoints ("alike") is what it makes
of equal things.

    python benchmarks/learned.py [--models small,gpt2] [--rounds 5] [--iterations 16] [--turns 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
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
AT_ONCE = 3  # iterations, of a turn


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
    first_s: dict[str, list[list[float]]]  # side -> of each round, of each iteration
    turns_s: dict[str, list[float]]  # side, or alike -> of each turn, its median iteration once a schedule is followed
    stall_ms: dict[str, float]  # an iteration of those
    recorded_in: int  # iteration
    learned_in: list[int]  # of each round, the iteration from whose checkpoint on the plan is followed
    ahead: Said
    learned: Said

    def at_first(self, side: str, iteration: int) -> float:
        """Median over rounds of a side's time over that of none, of an iteration from 1."""
        pairs = zip(self.first_s[side], self.first_s["none"], strict=True)
        return statistics.median(mine[iteration - 1] / none[iteration - 1] for mine, none in pairs)

    def later(self, side: str, over: str = "none") -> float:
        """The same of turns that follow each other."""
        pairs = zip(self.turns_s[side], self.turns_s[over], strict=True)
        return statistics.median(one / other for one, other in pairs)


class Side:
    """A training, attached or not, with a store that lasts until it is closed."""

    def __init__(self, factory: Callable[[], checkflow.Training], side: str, ahead: Schedule) -> None:
        with torch.device(overhead.DEVICE):
            training = factory()
        self.ckpt, self.run = None, training.iteration
        self._folder = tempfile.TemporaryDirectory()
        if side != "none":
            self.ckpt = _attached(training, Path(self._folder.name, "store"), ahead if side == "ahead" else None)
            self.run = partial(overhead.checkpointed, training, self.ckpt)

    @property
    def stall_ns(self) -> int:
        return 0 if self.ckpt is None else self.ckpt.stats().stall_ns

    def close(self) -> None:
        if self.ckpt is not None:
            self.ckpt.close()
        self._folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=16, help="of each round")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if overhead.DEVICE == "cpu" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | overhead.KEEP_MEMORY)
    profile = measure_profile("here", overhead.DEVICE)
    models = chosen.models.split(",")
    found = [measure(name, profile, chosen.rounds, chosen.iterations, chosen.turns) for name in models]
    for figures in found:
        show(figures, Console(width=120))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(figures) for figures in found]))


def measure(name: str, profile: hardware.Profile, rounds: int, iterations: int, turns: int) -> Figures:
    factory = overhead.factory_of(name)
    with torch.device(overhead.DEVICE):
        traced = trace_training(factory, model=name, measure=True)
    compiled = compile_graph(traced.graph, Options(hardware.link_bytes_per_s(profile), interval=1))
    assert isinstance(compiled, Compiled), "the link is too slow for a checkpoint at every iteration"
    first: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    learned_in: list[int] = []
    recorded_in = 0
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for number in range(rounds):
            for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                one = Side(factory, side, compiled.schedule)
                first[side].append([])
                for iteration in range(iterations):
                    first[side][-1].append(overhead.timed_s(one.run))
                    if not recorded_in and one.ckpt is not None and one.ckpt.learning == "planning":
                        recorded_in = iteration + 1
                if side == "learned" and one.ckpt is not None:
                    learned_in.append(one.ckpt.stats().learned_in)
                if number + 1 < rounds:
                    one.close()
                else:
                    sides[side] = one
                    stack.callback(one.close)
        assert all(learned_in), f"no schedule was learned in {iterations} iterations"
        sides["alike"] = Side(factory, "none", compiled.schedule)
        stack.callback(sides["alike"].close)
        turns_s, stall_ms = _in_turns(sides, turns)
        learned = sides["learned"].ckpt
        assert learned is not None
        return Figures(
            name, first, turns_s, stall_ms, recorded_in, learned_in, _said(compiled.schedule), _said(learned.schedule)
        )


def _in_turns(sides: dict[str, Side], turns: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Each side's median iteration in each turn, in seconds, and how long it stalled for checkpoints, in ms."""
    order = list(sides)
    for side in order:
        overhead.turn(sides[side].run, AT_ONCE)
    before = {side: sides[side].stall_ns for side in order}
    found: dict[str, list[float]] = {side: [] for side in order}
    for number in range(turns):
        at = number % len(order)
        for side in order[at:] + order[:at]:
            found[side].append(statistics.median(overhead.turn(sides[side].run, AT_ONCE)))
    trained = turns * (1 + AT_ONCE)
    return found, {side: (sides[side].stall_ns - before[side]) / trained / 1e6 for side in order}


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
    none_ms = statistics.median(figures.turns_s["none"]) * 1e3
    table = Table("", "ahead", "learned", title=f"{figures.model}: {none_ms:.1f} ms without checkpoints", box=None)
    for number in range(1, 11):
        mark = " (recorded)" if number == figures.recorded_in else ""
        ratios = (f"{figures.at_first(side, number):.3f}" for side in SIDES[1:])
        table.add_row(f"iteration {number}{mark}", *ratios)
    table.add_row("in turns, once learned", *(f"{figures.later(side):.3f}" for side in SIDES[1:]))
    table.add_row("learned over ahead", "", f"{figures.later('learned', 'ahead'):.3f}")
    table.add_row("alike over none", f"{figures.later('alike'):.3f}")
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
