"""Children that the training forks: an evaluation, one that trains, loader workers, one that outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch
from torch.utils.data import DataLoader, TensorDataset

from torturing.bench import HANG_S, Bench
from torturing.results import Outcome
from torturing.settings import SETTINGS
from torturing.trainer import Meddle, Trained

RUNS = (4, 16)
EVERY = 7  # iterations from one fork to the next
CHILD_S = 20.0


def run(bench: Bench, chance: Random, number: int) -> Iterator[Outcome]:
    """Each kind of child in turn; at the end of half of them the parent is killed while a child may live."""
    name = list(CHILDREN)[number % len(CHILDREN)]
    setting, killed = chance.choice(SETTINGS), number >= len(CHILDREN) and chance.random() < 0.5
    plan = replace(bench.plan(setting), more=10**6 if killed else 30, between=CHILDREN[name])
    life = bench.live(plan)
    if killed:
        life.completed(chance.randrange(EVERY, 30))
        time.sleep(chance.uniform(0.0, 0.02))
        life.forked.send(signal.SIGKILL)
    code = life.forked.wait(HANG_S)
    phase, entry = life.phase, life.entry()
    life.forked.end()
    wrong = bench.differs(life)
    if code is None:
        wrong = wrong or f"the trainer hangs while {phase.name.lower()}"
    elif code != (-signal.SIGKILL if killed else 0):
        wrong = wrong or f"the trainer ended with {code}: {''.join(life.trouble())}"
    if not bench.alone():
        wrong = wrong or "a process is left"
    lost = max(0, entry.completed - bench.restorable()) if killed else None
    if lost is not None and setting.trainer is not None and lost > setting.trainer:
        wrong = wrong or f"{entry.completed} iterations were completed, {lost} of them lost"
    what = f"{name}{', parent killed' if killed else ''}"
    yield Outcome(what, not wrong, setting.name, "trainer" if killed else "", setting.trainer, lost, wrong)
    wrong = bench.finish(replace(bench.plan(), more=3), at_least=entry.durable)
    yield Outcome("finished", identical=not wrong, wrong=wrong)


def _waited_for(pid: int) -> None:
    """Raises where the child hangs or ends badly."""
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            if code:
                raise RuntimeError(f"the child ended with {code}")
            return
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError("the child hangs")


def _evaluates(trained: Trained, iteration: int) -> None:
    """In eval mode, in a child, as some do beside the training."""
    if iteration % EVERY:
        return
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            trained.model.eval()
            with torch.no_grad():
                trained.model(torch.zeros(4, 32))
            code = 0
        finally:
            os._exit(code)
    _waited_for(pid)


def _trains(trained: Trained, iteration: int) -> None:
    """A child goes on training by itself, and calls what its parent calls."""
    if iteration % EVERY:
        return
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            trained.iterate()
            trained.ckpt.step()
            trained.ckpt.status()
            code = 0
        finally:
            os._exit(code)
    _waited_for(pid)


def _loads(_: Trained, iteration: int) -> None:
    """Forked workers of a DataLoader."""
    if iteration % EVERY:
        return
    numbers = TensorDataset(torch.arange(12.0))
    apart = torch.Generator().manual_seed(iteration)  # else it draws its seed from the training's generator
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(
        numbers, batch_size=4, num_workers=2, multiprocessing_context="fork", generator=apart
    )
    assert sum(float(batch[0].sum()) for batch in loader) == sum(range(12))


def _outlives(_: Trained, iteration: int) -> None:
    """A daemon that nobody waits for holds whatever it inherited for a second."""
    if iteration % EVERY == 0:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1.0,), daemon=True).start()


CHILDREN: dict[str, Meddle] = {
    "evaluation": _evaluates, "loader workers": _loads, "trains too": _trains, "outlives": _outlives,
}  # fmt: skip
