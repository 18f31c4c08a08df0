"""How much of a restore makes updates again, by policy: measured, beside what the schedule says.

Each policy that replays trains for a few iterations, each of them checkpointed in parts, and closes; trainings of their
own then restore what is newest, one after the other. Checkflow's own plan, which replays nothing, stands beside them.

    python benchmarks/replay.py [--models small] [--lanes 4] [--restores 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import overhead
from rich.console import Console
from rich.table import Table

import checkflow

POLICIES = ("checkflow", "lowdiff", "rolling", "gockpt")
HEADINGS = ("model", "policy", "state MB", "restore ms", "replay ms", "share", "as planned ms", "iterations ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="small", help="of small, gpt2")
    parser.add_argument("--lanes", type=int, default=4, help="parts of a checkpoint, each of another iteration")
    parser.add_argument("--restores", type=int, default=7)
    chosen = parser.parse_args()
    table = Table(*HEADINGS, box=None)
    for model in chosen.models.split(","):
        for policy in POLICIES:
            print(f"{model}: {policy}", file=sys.stderr)
            table.add_row(model, policy, *row(model, policy, chosen.lanes, chosen.restores))
    Console(width=120).print(table)


def row(model: str, policy: str, lanes: int, restores: int) -> list[str]:
    """Of one policy, in the order of HEADINGS behind the first two."""
    factory = overhead.factory_of(model)
    training = factory()
    schedule = checkflow.compile(
        training, policy=policy, device="measure", bandwidth="1TB/s",
        lanes=lanes if policy in ("lowdiff", "rolling") else None, interval=lanes if policy == "gockpt" else "auto",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        attach = partial(
            checkflow.attach, schedule=schedule, store=Path(folder, "store"), when_full="wait", tell=lambda _: None
        )
        with attach(training.model, training.optimizer) as ckpt:
            iterations = 3 * lanes - (policy == "lowdiff")  # whose newest has then as many deltas as there ever are
            times_s = overhead.turn(partial(overhead.checkpointed, training, ckpt), iterations - 1)
        resumed: list[checkflow.Resumed] = []
        for _ in range(restores):
            again, told = factory(), list[checkflow.Event]()
            with attach(again.model, again.optimizer, on_event=told.append) as ckpt:
                ckpt.restore()
            resumed += [event for event in told if isinstance(event, checkflow.Resumed)]
    whole_s = statistics.median(event.seconds for event in resumed)
    replay_s = statistics.median(event.replay_seconds or 0.0 for event in resumed)
    return [
        f"{schedule.state_bytes / 1e6:.0f}",
        f"{whole_s * 1e3:.1f}", f"{replay_s * 1e3:.1f}", f"{replay_s / whole_s:.0%}",
        f"{schedule.certificate.replay_ns / 1e6:.1f}", f"{statistics.median(times_s) * 1e3:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
