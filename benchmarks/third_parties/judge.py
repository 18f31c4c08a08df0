"""Compile a case as a user would; train it, kill it, resume it; compare every byte with a run without checkflow."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
import torch._dynamo  # a forked life does not import it at its first update
from forked import INTERNAL, Forked

import checkflow
from checkflow.cli import run as command_line
from checkflow.errors import EXIT_BAD_INPUT, EXIT_NO

from .case import Case
from .digests import digest
from .results import Row

MODEL = Path(__file__).with_name("model.py")
ITERATIONS = 12
PLANNED = 4  # iterations after which a life waits for the plan that it learns
LIFE_S = 120.0  # of a training of twelve small iterations


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a compilation."""

    seconds: float
    memory_bytes: int


class WrongError(Exception):
    """What no case may do, in one line."""


class RefusedError(Exception):
    """What checkflow said in one line."""


class NoCaseError(Exception):
    """It does not train without checkflow either."""


def judge(
    module: str, case: Case, folder: Path, limits: Limits, seed: int, *, kill: bool, learned: bool = False
) -> Row:
    """Everything below `folder`, which is removed. `learned`: it is attached without a schedule."""
    row = Row(module, case.name, "worked", interval=1 if learned else 0)
    try:
        whole = _plain(case, folder / "whole")
        if not learned:
            compiled = _compile(module, case, folder / "compiled", limits)
            row = replace(row, compile_s=compiled.seconds)
            row = _planned(row, compiled, folder / "schedule.json", limits)
        if kill:
            row = _resumed(row, case, folder, whole, random.Random(f"{seed} {module} {case.name}"))
    except RefusedError as reason:
        return replace(row, verdict="refused", reason=str(reason))
    except WrongError as reason:
        return replace(row, verdict="wrong", reason=str(reason))
    except NoCaseError as reason:
        return replace(row, verdict="no case", reason=str(reason))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def _plain(case: Case, folder: Path) -> list[str]:
    """Digests from before the first iteration to after the last."""

    def life() -> int:
        _quiet()
        training = case.build()
        print(digest(training))
        for _ in range(ITERATIONS):
            training.iteration()
            print(digest(training))
        return 0

    forked = Forked(life, folder)
    if forked.wait(LIFE_S) != 0:
        forked.end()
        raise NoCaseError(_last_line(forked))
    return forked.said()


@dataclass(frozen=True, slots=True)
class _Compiled:
    """`code` is None where it took too long."""

    forked: Forked
    code: int | None
    seconds: float


def _compile(module: str, case: Case, folder: Path, limits: Limits) -> _Compiled:
    """As a user does, with the command."""
    arguments = ["compile", str(MODEL), "--set", f"module={module}", "--set", f"name={case.name}"]

    def life() -> int:
        _quiet()
        return command_line([*arguments, "-o", str(folder / "schedule.json"), "--interval", "auto", "--json"])

    began = time.monotonic()
    forked = Forked(life, folder, memory_bytes=limits.memory_bytes)
    code = forked.wait(limits.seconds)
    forked.end()
    return _Compiled(forked, code, time.monotonic() - began)


def _planned(row: Row, compiled: _Compiled, schedule: Path, limits: Limits) -> Row:
    """With what the command said of the plan, which is moved to `schedule`."""
    if compiled.code is None:
        raise WrongError(f"compile has not ended after {limits.seconds:g} s")
    _judge_end("compile", compiled.code, compiled.forked)
    figures = json.loads(compiled.forked.said()[-1])
    shutil.move(compiled.forked.out.with_name("schedule.json"), schedule)
    return replace(row, state_bytes=figures["state_bytes"], interval=figures["interval"])


def _judge_end(what: str, code: int, forked: Forked) -> None:
    """Raises unless it ended well; RefusedError only for a refusal's exit code and a last line that is not too long."""
    if code == 0:
        return
    last, traced = _last_line(forked), "Traceback (most recent call last)" in forked.complaint()
    if code in (EXIT_NO, EXIT_BAD_INPUT) and last.startswith("checkflow: ") and len(last) <= 1000 and not traced:
        raise RefusedError(last.removeprefix("checkflow: "))
    raise WrongError(f"{what} ended with {code}: {_last_line(forked)}")


def _resumed(row: Row, case: Case, folder: Path, whole: list[str], chance: random.Random) -> Row:
    """Killed by an alarm at a random moment of an iteration, resumed, trained to the end."""
    until, part = chance.randrange(4, ITERATIONS - 2), chance.random()
    kill = Forked(lambda: _train(case, folder, _Alarm(until, part)), folder / "killed")
    code = kill.wait(LIFE_S)
    kill.end()
    if code is None:
        raise WrongError("the attached training hangs")
    if code != -signal.SIGALRM:
        _judge_end("the attached training", code or INTERNAL, kill)
    first = _compared(kill, whole)
    again = Forked(lambda: _train(case, folder, _Alarm(-1, 0.0)), folder / "resumed")
    code = again.wait(LIFE_S)
    again.end()
    if code is None:
        raise WrongError("the resumed training hangs")
    if code:
        raise WrongError(f"resuming ended with {code}: {_last_line(again)}")
    second = _compared(again, whole)
    row = replace(row, killed=True, completed=first[-1], lost=max(0, first[-1] - second[0]))
    learned = [line.split()[1] for life in (kill, again) for line in life.said() if line.startswith("learned ")]
    row = replace(row, learned_in=int(learned[0]) if learned else 0)
    if second[-1] != ITERATIONS:
        raise WrongError(f"the resumed training ended at {second[-1]}")
    if row.lost >= 2 * row.interval:  # a checkpoint may be on its way until the next one begins
        raise WrongError(f"{first[-1]} iterations were completed, {second[0]} restored")
    return row


def _train(case: Case, folder: Path, alarm: _Alarm) -> int:
    """Says "at I DIGEST" of what is restored and of each iteration."""
    _quiet()
    training, schedule = case.build(), folder / "schedule.json"
    with checkflow.attach(
        training.model, training.optimizer, schedule=schedule if schedule.exists() else None, store=folder / "store",
        when_full="wait", slots=2, notify=lambda _: None,
    ) as ckpt:  # fmt: skip
        first, learned = ckpt.restore(), 0
        print(f"at {first} {digest(training)}", flush=True)
        for iteration in range(first, ITERATIONS):
            while iteration - first >= PLANNED and ckpt.learning == "planning":
                time.sleep(0.01)  # these iterations are too short for a plan to come in time by itself
            alarm.begins(iteration)
            training.iteration()
            ckpt.step()
            alarm.ended()
            if not learned and (learned := ckpt.stats().learned_in):
                print(f"learned {learned}", flush=True)
            print(f"at {iteration + 1} {digest(training)}", flush=True)
    return 0


class _Alarm:
    """Kills in the iteration after `until`, at this part of the time that the one before took. It asks nobody."""

    def __init__(self, until: int, part: float) -> None:
        self._until, self._part = until, part
        self._began_s = self._took_s = 0.0

    def begins(self, iteration: int) -> None:
        self._began_s = time.monotonic()
        if iteration == self._until:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, self._part * self._took_s))

    def ended(self) -> None:
        self._took_s = time.monotonic() - self._began_s


def _compared(forked: Forked, whole: list[str]) -> list[int]:
    """The iterations that it said; WrongError where the state of one is another than without checkflow."""
    said = [line.split() for line in forked.said() if line.startswith("at ")]
    if not said:
        raise WrongError(f"said nothing: {_last_line(forked)}")
    for _, iteration, content in said:
        if int(iteration) and whole[int(iteration)] != content:  # before the first, attach makes the optimizer's state
            raise WrongError(f"{forked.out.parent.name}: the state after iteration {iteration} differs")
    return [int(iteration) for _, iteration, _ in said]


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    random.seed(0)  # a fork seeds it anew
    numpy.random.seed(0)
    torch.manual_seed(0)


def _last_line(forked: Forked) -> str:
    lines = [line.strip() for line in forked.complaint().splitlines() if line.strip()]
    return lines[-1][:2000] if lines else "nothing was said"
