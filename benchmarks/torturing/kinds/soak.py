"""A long training with saves and evaluations: memory, descriptors, threads, processes stay what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from peering.processes import tree

from checkflow.store.trainer.persist_every import PersistEvery
from torturing.bench import Bench
from torturing.results import Outcome
from torturing.settings import Setting
from torturing.trainer import Trained

RUNS = (1, 1)
ITERATIONS = {True: 1_000, False: 20_000}  # by whether it is short
LIMIT_S = 1800.0
WARM = 0.25  # of the iterations, until what is kept is there
BY_CHANCE = {"KiB": 4096, "threads": 4, "descriptors": 8, "processes": 0}  # more, where it is just writing
SETTING = Setting("slots=3, persist each 10th", persist_every=PersistEvery(iterations=10))


def run(bench: Bench, _: Random, __: int) -> Iterator[Outcome]:
    """Looked at after a quarter and at the end; then compared with the oracle."""
    iterations, seen = ITERATIONS[bench.short], bench.folder / "seen"

    def look(trained: Trained, iteration: int) -> None:
        if iteration % 500 == 250:
            trained.ckpt.save(keep=False)
        if iteration in (int(WARM * iterations), iterations):
            with seen.open("a") as file:
                file.write(json.dumps(_figures()) + "\n")

    life = bench.live(replace(bench.plan(SETTING), more=iterations, between=look))
    code = life.forked.wait(LIMIT_S)
    life.forked.end()
    wrong = bench.differs(life)
    if code != 0:
        wrong = wrong or f"ended with {code} after {life.entry().completed} iterations: {''.join(life.trouble())}"
    note = ""
    if not wrong:
        warm, end = (json.loads(line) for line in seen.read_text().splitlines())
        note = f"{warm} -> {end}"
        grown = [name for name in warm if end[name] > warm[name] + BY_CHANCE[name.split()[-1]]]
        wrong = f"grew: {', '.join(f'{name} from {warm[name]} to {end[name]}' for name in grown)}" if grown else ""
    if not bench.alone():
        wrong = wrong or "a process is left"
    yield Outcome(f"{iterations} iterations", identical=not wrong, wrong=wrong, note=note)


def _figures() -> dict[str, int]:
    pids = tree(os.getpid())
    figures = {"processes": len(pids)}
    for name, pid in zip(("trainer", "saver"), pids, strict=False):
        folder = Path(f"/proc/{pid}")
        status = dict(line.split(":\t") for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        figures[f"{name} private KiB"] = int(status["RssAnon"].split()[0])
        figures[f"{name} threads"] = int(status["Threads"])
        figures[f"{name} descriptors"] = len(list((folder / "fd").iterdir()))
    return figures
