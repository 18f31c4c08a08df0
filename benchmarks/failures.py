"""What simulated failures cost beside what real ones do: a small net's trainer, killed at random, again and again.

Under each policy the trainer lives for an exponential time after its restore, then is killed by SIGKILL; the next one
restores. Simulated is the same policy with the measured time of an iteration and the same mean, in many runs. Compared
are the iterations done again for each kill, and the share of the time up in which training got ahead.

    python benchmarks/failures.py [--kills 30] [--mean 0.4] [--seed 0] [--policies checkfreq ...]
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import checkflow
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.schedule import read_schedule, write_schedule
from checkflow.simulation.costs import Costs, costs_of
from checkflow.simulation.failures import run
from checkflow.simulation.incidents import Loss, exponential
from checkflow.trace import trace_training

POLICIES = {"checkflow": ("checkflow", 1), "checkflow, every 10": ("checkflow", 10), "checkfreq": ("checkfreq", 1)}
LINK, DISK = 2_000_000_000, 500_000_000
HANGS_S = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    redone: tuple[int, ...]  # of each kill
    effective: float
    iteration_ns: int


def training() -> checkflow.Training:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 256)

    def iteration() -> None:
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


def train(schedule: str, store: str) -> None:
    """Until it is killed; says each iteration that it has completed, and first the one that it restored."""
    torch.set_num_threads(1)
    made = training()
    with checkflow.attach(made.model, made.optimizer, schedule=schedule, store=store, tell=lambda _: None) as ckpt:
        iteration = ckpt.restore()
        while True:
            print(iteration, flush=True)
            made.iteration()
            ckpt.step()
            iteration += 1


def compiled(name: str, path: Path) -> Path:
    policy, interval = POLICIES[name]
    torch.set_num_threads(1)
    graph = trace_training(training, model="small", measure=True).graph
    found = compile_graph(graph, Options(LINK, interval=interval, policy=policy))
    assert isinstance(found, Compiled), f"{name}: the link is too slow"
    write_schedule(path, found.schedule)
    return path


def measure(schedule: Path, store: Path, kills: int, mean_s: float, seed: int) -> Measured:
    chance, redone, gaps = random.Random(seed), list[int](), list[float]()
    reached, ahead, up_s = 0, 0, 0.0
    for _ in range(kills + 1):
        first, last, times = _live(schedule, store, chance.expovariate(1 / mean_s))
        if up_s:  # the life before it was one of those that count
            redone.append(reached - first)
            ahead -= reached - first
        if len(redone) == kills:
            break
        reached, ahead, up_s = last, ahead + last - first, up_s + times[-1]
        gaps += (later - earlier for earlier, later in pairwise(times[:-1]))
    iteration_s = statistics.fmean(gaps)
    return Measured(tuple(redone), ahead * iteration_s / up_s, round(iteration_s * 1e9))


def _live(schedule: Path, store: Path, life_s: float) -> tuple[int, int, list[float]]:
    """The iteration it restored, the last that it completed, and when each was, then its death, since it restored."""
    command = [sys.executable, __file__, "--train", str(schedule), str(store)]
    times, said = list[float](), list[int]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        killer = threading.Timer(HANGS_S, process.send_signal, [signal.SIGKILL])
        killer.start()
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # cut by the kill
            times.append(time.monotonic())
            said.append(int(line))
            if len(said) == 1:
                killer.cancel()
                killer = threading.Timer(life_s, process.send_signal, [signal.SIGKILL])
                killer.start()
        killer.cancel()
    assert said, "it hangs before its first iteration"
    return said[0], said[-1], [at - times[0] for at in times] + [life_s]


def costs(schedule: Path, measured: Measured) -> Costs:
    """Stalls are in the measured iterations; only time up is compared, so nothing restarts."""
    found = costs_of(read_schedule(schedule), DISK)
    return replace(found, iteration_ns=measured.iteration_ns, stall_ns=0, restore_memory_ns=0, write_ns=0)


def simulated(policy: Costs, kills: int, mean_s: float, runs: int = 400) -> tuple[list[float], list[float]]:
    """Of runs with as many kills as were measured: iterations done again for each, and the effective share."""
    span_ns = int(kills * mean_s * 1e9)
    trials = [run(policy, exponential(mean_s * 1e9, 0.0, seed), span_ns) for seed in range(runs)]
    failed = [trial for trial in trials if trial.failures[Loss.TRAINER]]
    return (
        [trial.redone[Loss.TRAINER] / trial.failures[Loss.TRAINER] for trial in failed],
        [trial.effective for trial in failed],
    )


def interval(values: list[float]) -> tuple[float, float]:
    """Where 99% of the simulated runs lie."""
    ordered = sorted(values)
    return ordered[len(ordered) // 200], ordered[-1 - len(ordered) // 200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--mean", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        train(*chosen.train)
    table = Table("policy", "iteration", "redone a kill", "simulated", "99% of runs", "effective", "simulated",
                  "99% of runs", box=None)  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in chosen.policies:
            home = Path(folder, name.replace(", ", "-").replace(" ", "-"))
            home.mkdir()
            schedule = compiled(name, home / "schedule.json")
            found = measure(schedule, home / "store", chosen.kills, chosen.mean, chosen.seed)
            redone, effective = simulated(costs(schedule, found), chosen.kills, chosen.mean)
            table.add_row(
                name, f"{found.iteration_ns / 1e6:.2f} ms",
                f"{statistics.fmean(found.redone):.2f}", f"{statistics.fmean(redone):.2f}",
                "{:.2f} to {:.2f}".format(*interval(redone)),
                f"{found.effective:.2%}", f"{statistics.fmean(effective):.2%}",
                "{:.2%} to {:.2%}".format(*interval(effective)),
            )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
