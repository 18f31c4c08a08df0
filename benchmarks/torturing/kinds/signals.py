"""Signals to trainer and saver: SIGTERM, Ctrl-C once and twice, a closed terminal, a stopped process that goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from peering.processes import tree

from torturing.bench import HANG_S, Bench, Life
from torturing.results import Outcome
from torturing.settings import SETTINGS
from torturing.trainer import Phase

RUNS = (3, 24)
STEADY = [setting for setting in SETTINGS if setting.trainer is not None]


def run(bench: Bench, chance: Random, number: int) -> Iterator[Outcome]:
    """Each signal in turn, at a random moment of training."""
    name = list(SIGNALS)[number % len(SIGNALS)]
    setting, signals = chance.choice(STEADY), SIGNALS[name]
    ends = name not in ("stopped trainer", "stopped saver", "to the saver")
    plan = replace(bench.plan(setting), more=10**6 if ends else 120)
    life = bench.live(plan)
    life.completed(chance.randrange(1, 30))
    time.sleep(chance.uniform(0.0, 0.02))
    before = life.entry().completed
    signals(life, chance)
    code = life.forked.wait(HANG_S)
    phase = life.phase
    completed = max(life.entry().completed, before)
    trouble = "".join(life.trouble())
    life.forked.end()
    wrong = bench.differs(life)
    if code is None:
        wrong = wrong or f"the trainer hangs while {phase.name.lower()}"
    elif (not ends and code != 0) or (trouble and code != 128 + signal.SIGINT):
        wrong = wrong or f"the trainer ended with {code}: {trouble}"
    if not bench.alone():
        wrong = wrong or "a saver does not end"
    lost = max(0, completed - bench.restorable())
    promised = 0 if name in ("SIGTERM", "stopped trainer", "stopped saver", "to the saver") else setting.trainer
    if setting.interval > 1 and name.startswith("Ctrl-C"):
        promised = None
    if promised is not None and lost > promised:
        wrong = wrong or f"{completed} iterations were completed, {completed - lost} can be restored"
    yield Outcome(name, not wrong, setting.name, name, promised, lost, wrong)
    wrong = bench.finish(replace(bench.plan(), more=chance.randrange(1, 10)), at_least=0 if wrong else completed - lost)
    yield Outcome("finished", identical=not wrong, wrong=wrong)


def _terminated(life: Life, _: Random) -> None:
    life.forked.send(signal.SIGTERM)


def _terminated_twice(life: Life, chance: Random) -> None:
    life.forked.send(signal.SIGTERM)
    time.sleep(chance.uniform(0.0, 0.05))
    life.forked.send(signal.SIGTERM)


def _interrupted(life: Life, _: Random) -> None:
    os.killpg(life.forked.pid, signal.SIGINT)


def _interrupted_twice(life: Life, chance: Random) -> None:
    _interrupted(life, chance)
    time.sleep(chance.uniform(0.0, 0.1))
    with contextlib.suppress(ProcessLookupError):
        _interrupted(life, chance)


def _hung_up(life: Life, _: Random) -> None:
    """The terminal is closed: everybody hears of it, the saver too."""
    for pid in tree(life.forked.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)


def _stopped(life: Life, chance: Random) -> None:
    for _ in range(5):
        life.forked.send(signal.SIGSTOP)
        time.sleep(chance.uniform(0.0, 0.1))
        life.forked.send(signal.SIGCONT)
        time.sleep(chance.uniform(0.0, 0.02))


def _saver_stopped(life: Life, chance: Random) -> None:
    for _ in range(5):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in tree(life.forked.pid)[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(chance.uniform(0.0, 0.1))


def _to_the_saver(life: Life, _: Random) -> None:
    """What a terminal or a batch system sends to everybody; it has to ignore them."""
    life.came_to(Phase.TRAINING)
    for pid in tree(life.forked.pid)[1:]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


SIGNALS: dict[str, Callable[[Life, Random], None]] = {
    "SIGTERM": _terminated,
    "Ctrl-C twice": _interrupted_twice,
    "stopped saver": _saver_stopped,
    "SIGTERM twice": _terminated_twice,
    "Ctrl-C": _interrupted,
    "SIGHUP": _hung_up,
    "stopped trainer": _stopped,
    "to the saver": _to_the_saver,
}
