"""Iterations lost by setting: the trainer alone, and everything at once, killed at random moments of training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from torturing import strikes
from torturing.bench import Bench
from torturing.results import Outcome
from torturing.settings import SETTINGS

from .kills import promise

RUNS = (0, 31)
KILLS = 10  # one after the other in one store
SETTLED = 5  # iterations before a kill: the saver that the first one starts is there
LONGEST_S = 0.3  # from then to the kill
ROWS = [(setting, who) for setting in SETTINGS for who in ("trainer", "everything", "saver, then trainer")]


def run(bench: Bench, chance: Random, number: int) -> Iterator[Outcome]:
    """Of one setting and one who dies; the runs take them in turn."""
    setting, who = ROWS[number % len(ROWS)]
    strike = (strikes.ALONE | strikes.ALL)[who]
    promised, completed, plan = promise(setting, who), 0, bench.plan(setting)
    for kill in range(KILLS + 1):
        life = bench.live(plan)
        life.completed(SETTLED)
        if life.forked.code() is not None:
            wrong = f"the trainer ended with {life.forked.code()}: {''.join(life.trouble())}"
            yield Outcome(f"{who} killed", False, setting.name, who, promised, wrong=wrong)
            return
        if kill:
            restored = life.entry().restored
            lost = max(0, completed - restored)
            wrong = bench.differs(life)
            if promised is not None and lost > promised:
                wrong = wrong or f"{completed} iterations were completed, {restored} restored"
            yield Outcome(f"{who} killed", not wrong, setting.name, who, promised, lost, wrong)
        time.sleep(chance.uniform(0.0, LONGEST_S))
        strike(life, chance)
        life.forked.end()
        completed = life.entry().completed
        bench.alone()
    wrong = bench.finish(replace(plan, more=chance.randrange(1, 10)))
    yield Outcome("finished", identical=not wrong, wrong=wrong)
