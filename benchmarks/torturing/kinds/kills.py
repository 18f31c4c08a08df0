"""SIGKILL of trainer, saver, both, at random moments: while it attaches, restores, trains, saves, closes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from torturing import strikes
from torturing.bench import HANG_S, Bench, Life
from torturing.oracle import ITERATIONS
from torturing.results import Outcome
from torturing.settings import SETTINGS, Setting
from torturing.trainer import Phase, Plan

RUNS = (2, 30)
KILLS = 6  # one after the other in one store
WHO = strikes.ALONE | strikes.ALL | {"saver": strikes.saver}
STARTUP_S = 0.6  # of attaching and restoring, roughly


def run(bench: Bench, chance: Random, _: int) -> Iterator[Outcome]:
    """A store's life: killed again and again, then finished in peace."""
    before = 0
    for _ in range(KILLS):
        outcome, before = _killed(bench, chance, before)
        yield outcome
    wrong = bench.finish(replace(bench.plan(chance.choice(SETTINGS)), more=chance.randrange(1, 30)), at_least=before)
    yield Outcome("finished", identical=not wrong, wrong=wrong)


def _killed(bench: Bench, chance: Random, before: int) -> tuple[Outcome, int]:
    """One life; `before` is what it can restore, and what the next one can is returned."""
    setting, who, moment = chance.choice(SETTINGS), chance.choice(list(WHO)), chance.random()
    more = chance.randrange(3, 12) if moment > 0.8 else 150 if who == "saver" else ITERATIONS
    plan = Plan(bench.schedule, bench.store, setting, more=more, saves=chance.choice((0.0, 0.05)))
    life = bench.live(plan)
    _wait(life, moment, chance)
    what = f"{who} killed while {life.phase.name.lower()}"
    WHO[who](life, chance)
    code = life.forked.wait(HANG_S)
    entry = life.entry()
    life.forked.end()
    wrong = bench.differs(life)
    if code is None:
        wrong = wrong or f"{what}: the trainer hangs while {life.phase.name.lower()}"
    elif code > 0:
        wrong = wrong or f"{what}: the trainer ended with {code}: {''.join(life.trouble())}"
    if not bench.alone():
        wrong = wrong or f"{what}: a saver does not end"
    after = bench.restorable()
    lost = max(0, entry.completed - after) if entry.phase >= Phase.TRAINING else None
    promised = promise(setting, who)
    if lost is not None and promised is not None and lost > promised:
        wrong = wrong or f"{entry.completed} iterations were completed, {after} can be restored"
    if after < max(before, entry.durable):
        wrong = wrong or f"iteration {max(before, entry.durable)} was durable, {after} can be restored"
    identical = not wrong if life.said() else None
    return Outcome(what, identical, setting.name, who, promised, lost, wrong), after


def _wait(life: Life, moment: float, chance: Random) -> None:
    if moment < 0.3:
        time.sleep(chance.uniform(0.0, STARTUP_S))
    elif moment <= 0.8:
        life.completed(chance.randrange(1, 40))
        time.sleep(chance.uniform(0.0, 0.01))
    else:
        life.came_to(Phase.CLOSING)
        time.sleep(chance.uniform(0.0, 0.05))


def promise(setting: Setting, who: str) -> int | None:
    """The most that this death costs. A trainer whose saver died is to start another, and then to lose nothing."""
    if who == "saver":
        return 0
    return setting.trainer if who in strikes.ALONE else setting.everything
