"""Calls in any order: saves, rollbacks to what the store holds, status, an iteration that raises, a second attach."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from checkflow.store.format.reader import Checkpoint, list_checkpoints
from torturing.bench import HANG_S, Bench
from torturing.results import Outcome
from torturing.settings import SETTINGS
from torturing.trainer import Trained

RUNS = (1, 12)
MORE = 60  # iterations of a life


def run(bench: Bench, chance: Random, _: int) -> Iterator[Outcome]:
    """One life of random calls. Each says its state whenever that is one of the oracle's."""
    setting, seed, store = chance.choice(SETTINGS), chance.random(), bench.store
    calls = random.Random(seed)

    def meddle(trained: Trained, iteration: int) -> None:
        call = calls.random()
        if call < 0.05:
            trained.ckpt.save(keep=calls.random() < 0.3)
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
    torn = _all_oracle(bench)
    yield Outcome("calls", not (wrong or torn), setting.name, wrong=wrong or torn)
    wrong = bench.finish(replace(bench.plan(), more=3))
    yield Outcome(f"finished after calls, store {store.name}", identical=not wrong, wrong=wrong)


def _back_and_forth(trained: Trained, iteration: int, calls: Random, bench: Bench) -> None:
    """Roll back to a checkpoint that the store holds, say it, and train up to where it was."""
    held = [each.iteration for each in list_checkpoints(bench.store) if isinstance(each, Checkpoint)]
    earlier = [each for each in held if each <= iteration]
    if not earlier:
        return
    back = trained.ckpt.restore(calls.choice(earlier))
    trained.rewind()
    trained.say(back)
    for again in range(back + 1, iteration + 1):
        trained.iterate()
        trained.ckpt.step()
        if calls.random() < 0.1:
            trained.say(again)
    trained.say(iteration)


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
