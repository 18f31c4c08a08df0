"""Every policy side by side on one net: what each costs training, memory, link and disk, and what a failure loses.

In each round every policy trains a model of its own, checkpointed; the order rotates, and a training without
checkpoints is one of them. Times are medians over rounds of an iteration's median over that of the same round without
checkpoints. Lost is what a kill at an iteration's end would lose: iterations that are in no slot (the trainer dies) or
not on disk (the machine is lost), the mean over all measured iterations. What does not fit an interval says why, and a
policy of ours that another one beats somewhere and is beaten by nowhere, beyond what rounds differ by, is named.

    python benchmarks/policies.py [--models small,gpt2] [--intervals 1,4] [--rounds 5] [--iterations 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path

import overhead
import torch
from rich.console import Console
from rich.table import Table

import checkflow
from checkflow import hardware, policies
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.hardware.measure import measure_profile
from checkflow.schedule import Schedule
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace import trace_training

OURS = ("checkflow", "gockpt", "rolling")


@dataclass(frozen=True, slots=True)
class Round:
    """One training of a policy; without checkpoints it has only times."""

    times_s: tuple[float, ...]
    stall_s: float = 0.0  # of an iteration: the training waited
    host_bytes: int = 0  # resident, of the slots
    link_bytes: float = 0.0  # of an iteration
    disk_bytes: float = 0.0  # of an iteration
    restore_s: float = 0.0
    lost_killed: float = 0.0  # iterations
    lost_machine: float = 0.0  # iterations


@dataclass(frozen=True, slots=True)
class Figure:
    """Over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))


COSTS = (  # each is the better the less it is
    "time", "stall ms", "device +MB", "host MB", "link MB/it", "disk MB/it", "restore s", "lost, kill", "lost, machine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What a policy costs at an interval, in the order of COSTS."""

    policy: str
    interval: int
    costs: tuple[Figure, ...]

    def is_dominated_by(self, other: Row) -> bool:
        """Whether that is better in some figure and worse in none. Figures whose rounds overlap are alike."""
        pairs = list(zip(self.costs, other.costs, strict=True))
        worse = any(theirs.least > ours.most for ours, theirs in pairs)
        return not worse and any(ours.least > theirs.most for ours, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,gpt2")
    parser.add_argument("--intervals", default="1,4")
    parser.add_argument("--rounds", type=int, default=5, help="figures of 3 differ by chance in one of ten")
    parser.add_argument("--iterations", type=int, default=12, help="measured in each round, or whole intervals of more")
    parser.add_argument("--persist-every", type=int, default=4, help="iterations, at least")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if overhead.DEVICE == "cpu" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | overhead.KEEP_MEMORY)
    link_bytes_per_s = hardware.link_bytes_per_s(measure_profile("here", overhead.DEVICE))
    console, report = Console(width=150), {}
    for model in chosen.models.split(","):
        schedules, refused = planned(model, link_bytes_per_s, [int(each) for each in chosen.intervals.split(",")])
        plain_s, rows = measured(model, schedules, chosen.rounds, chosen.iterations, chosen.persist_every)
        show(model, plain_s, rows, refused, console)
        report[model] = {"plain_s": plain_s, "rows": [asdict(row) for row in rows], "refused": refused}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report))


def planned(model: str, link_bytes_per_s: int, intervals: Sequence[int]) -> tuple[list[Schedule], list[str]]:
    """What each policy does at each interval, and why others cannot."""
    with torch.device(overhead.DEVICE):
        graph = trace_training(overhead.factory_of(model), model=model, measure=True).graph
    found: list[Schedule] = []
    refused: list[str] = []
    for policy in policies.names():
        for interval in intervals:
            compiled = compile_graph(graph, Options(link_bytes_per_s, interval=interval, policy=policy))
            if isinstance(compiled, Compiled):
                found.append(compiled.schedule)
            else:
                refused.append(f"{policy} {interval}: {compiled.answer.detail}")
    return found, refused


def measured(
    model: str, schedules: Sequence[Schedule], rounds: int, iterations: int, persist_every: int
) -> tuple[float, list[Row]]:
    """Seconds of an iteration without checkpoints, and what each schedule costs beside it."""
    sides: list[Schedule | None] = [None, *schedules]
    found: list[list[Round]] = [[] for _ in sides]
    for number in range(rounds):
        order = [(number + place) % len(sides) for place in range(len(sides))]
        for done, side in enumerate(order):
            print(f"{model}: round {number + 1} of {rounds}, {done + 1} of {len(sides)}", file=sys.stderr)
            found[side].append(one_round(model, sides[side], iterations, persist_every))
    plain = [statistics.median(each.times_s) for each in found[0]]
    rows = [row_of(schedule, each, plain) for schedule, each in zip(schedules, found[1:], strict=True)]
    return statistics.median(plain), rows


def one_round(model: str, schedule: Schedule | None, iterations: int, persist_every: int) -> Round:
    """A training of its own, and a second one that restores what it left."""
    factory = overhead.factory_of(model)
    with torch.device(overhead.DEVICE):
        training = factory()
    if schedule is None:
        overhead.turn(training.iteration, 2)
        return Round(tuple(overhead.timed_s(training.iteration) for _ in range(iterations)))
    count = -(-iterations // schedule.interval) * schedule.interval  # the last checkpoint is one that was due
    persist_every = max(persist_every, schedule.interval)
    with tempfile.TemporaryDirectory() as folder:
        persist = PersistEvery(iterations=persist_every)
        attach = partial(
            checkflow.attach, schedule=schedule, store=Path(folder, "store"), when_full="wait", persist_every=persist,
            tell=lambda _: None,
        )  # fmt: skip
        with attach(training.model, training.optimizer) as ckpt:
            run = partial(overhead.checkpointed, training, ckpt)
            # the first checkpoint in parts is proven; a replica's process is there once it has made one
            overhead.turn(run, 2 * schedule.interval - 1 + schedule.replica)
            ckpt.save()
            before, earlier, times_s = ckpt.stats(), ckpt.status(), list[float]()
            lost: list[tuple[int, int]] = []
            for completed in range(before.iterations + 1, before.iterations + count + 1):
                times_s.append(overhead.timed_s(run))
                status = ckpt.status()
                lost.append((completed - (status.staged_iteration or 0), completed - (status.durable_iteration or 0)))
            stall_ns, host_bytes = ckpt.stats().stall_ns - before.stall_ns, slot_bytes()
            ckpt.save()  # what is on its way is counted
            after, later = ckpt.stats(), ckpt.status()
        with torch.device(overhead.DEVICE):
            again = factory()
        with attach(again.model, again.optimizer) as ckpt:
            began = time.perf_counter()
            ckpt.restore()
            restore_s = time.perf_counter() - began
    return Round(
        tuple(times_s),
        stall_ns / 1e9 / count,
        host_bytes,
        (after.offloaded_bytes - before.offloaded_bytes) / count,
        (later.written_bytes - earlier.written_bytes) / (later.durable - earlier.durable) / persist_every,
        restore_s,
        *map(statistics.fmean, zip(*lost, strict=True)),
    )


def slot_bytes() -> int:
    """Resident memory of the slots, in this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "checkflow-slots" in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def row_of(schedule: Schedule, rounds: Sequence[Round], plain_s: Sequence[float]) -> Row:
    claims = schedule.certificate
    costs = (
        [statistics.median(each.times_s) / plain for each, plain in zip(rounds, plain_s, strict=True)],
        [each.stall_s * 1e3 for each in rounds],
        [(claims.peak_bytes - claims.training_peak_bytes) / 1e6],
        [each.host_bytes / 1e6 for each in rounds],
        [each.link_bytes / 1e6 for each in rounds],
        [each.disk_bytes / 1e6 for each in rounds],
        [each.restore_s for each in rounds],
        [each.lost_killed for each in rounds],
        [each.lost_machine for each in rounds],
    )
    return Row(schedule.policy, schedule.interval, tuple(map(Figure.of, costs)))


def show(model: str, plain_s: float, rows: Sequence[Row], refused: Sequence[str], console: Console) -> None:
    title = f"{model}: {plain_s * 1e3:.1f} ms without checkpoints"
    table = Table("policy", "every", *COSTS, title=title, box=None)
    for row in rows:
        medians = (cost.median for cost in row.costs)
        table.add_row(
            row.policy, str(row.interval), *(f"{each:.3f}" if each < 100 else f"{each:.0f}" for each in medians)
        )
    console.print(table)
    for line in refused:
        console.print(f"cannot: {line}")
    for ours, other in permutations(rows, 2):
        if ours.policy in OURS and other.policy not in OURS and ours.is_dominated_by(other):
            console.print(f"{ours.policy} {ours.interval} is dominated by {other.policy} {other.interval}")


if __name__ == "__main__":
    main()
