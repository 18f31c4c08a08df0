"""Calls in any order: saves, rollbacks to what the store holds, status, an iteration that raises, a second attach."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from checkflow.errors import StoreError
from checkflow.store.format.reader import Checkpoint, list_checkpoints
from torturing.bench import HANG_S, Bench
from torturing.results import Outcome
from torturing.schedules import ROLLING
from torturing.settings import SETTINGS
from torturing.trainer import Trained

RUNS = (2, 12)
MORE = 60  # iterations of a life


def run(bench: Bench, chance: Random, number: int) -> Iterator[Outcome]:
    """One life of random calls. Each says its state whenever that is one of the oracle's. Every other is in lanes."""
    in_lanes = number % 2 == 1
    if in_lanes:
        bench.schedule = bench.schedule.with_name(ROLLING)
    setting = chance.choice([each for each in SETTINGS if not in_lanes or (each.interval == 1 and each.slots > 1)])
    seed, store = chance.random(), bench.store
    calls = random.Random(seed)
    kept = bench.store.with_name(f"{bench.store.name}.kept")  # a line for each iteration

    def meddle(trained: Trained, iteration: int) -> None:
        call = calls.random()
        if call < 0.05:
            keep = calls.random() < 0.3
            trained.ckpt.save(keep=keep)
            if keep:
                with kept.open("a") as file:
                    print(iteration, file=file)
        elif call < 0.10:
            trained.ckpt.status()
            trained.ckpt.stats()
        elif call < 0.16:
            _back_and_forth(trained, iteration, calls, bench)

    life = bench.live(replace(bench.plan(setting), more=MORE, between=meddle))
    code = life.forked.wait(HANG_S)
    phase = life.phase
    life.forked.end()
    wrong = bench.differs(life)
    if code is None:
        wrong = wrong or f"hangs while {phase.name.lower()}"
    elif code:
        wrong = wrong or f"ended with {code}: {''.join(life.trouble())}"
    bench.alone()
    torn = _all_oracle(bench) or _lacks(bench, kept)
    yield Outcome("calls in lanes" if in_lanes else "calls", not (wrong or torn), setting.name, wrong=wrong or torn)
    wrong = bench.finish(replace(bench.plan(), more=3))
    yield Outcome(f"finished after calls, store {store.name}", identical=not wrong, wrong=wrong)


def _back_and_forth(trained: Trained, iteration: int, calls: Random, bench: Bench) -> None:
    """Roll back to a checkpoint that the store holds, say it, and train up to where it was."""
    while True:
        earlier = [each for each in _held(bench) if each <= iteration]
        if not earlier:
            return
        asked = calls.choice(earlier)
        try:
            back = trained.ckpt.restore(asked)
            break
        except StoreError:
            if asked in _held(bench):  # else it was pruned since it was listed
                raise
    trained.rewind()
    trained.say(back)
    for again in range(back + 1, iteration + 1):
        trained.iterate()
        trained.ckpt.step()
        if calls.random() < 0.1:
            trained.say(again)
    trained.say(iteration)


def _held(bench: Bench) -> list[int]:
    return [each.iteration for each in list_checkpoints(bench.store) if isinstance(each, Checkpoint)]


def _lacks(bench: Bench, kept: Path) -> str:
    """What was to be kept for good, and is not there."""
    said = {int(line) for line in kept.read_text().split()} if kept.exists() else set()
    gone = sorted(said - set(_held(bench)))
    return f"iterations {gone} were kept, and are gone" if gone else ""


def _all_oracle(bench: Bench) -> str:
    """Restores each checkpoint that the store holds: what differs from the oracle's iteration of that number."""
    for found in list_checkpoints(bench.store):
        if not isinstance(found, Checkpoint):
            return f"{found} is no sound checkpoint"
        only = found.iteration

        def roll_back(trained: Trained, _: int, to: int = only) -> None:
            back = trained.ckpt.restore(to)
            trained.rewind()
            trained.say(back)
            os._exit(0)

        life = bench.live(replace(bench.plan(), more=1, between=roll_back))
        life.forked.wait(HANG_S)
        life.forked.end()
        bench.alone()
        wrong = bench.differs(life)
        if wrong:
            return f"checkpoint {found.path.name}: {wrong}"
    return ""
