"""The training that is tortured. It notes where it is, and says "at I DIGEST" of what is restored and of its end."""

from __future__ import annotations

import enum
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import trainer_to_kill
from peering.lives import Diary, Entry
from torch import nn

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.store.trainer.delivery import OnError

from .oracle import ITERATIONS
from .settings import Setting

RETRY_S = 15.0  # so that a saver that can never start ends a life within what would count as hanging


class Phase(enum.IntEnum):
    """Where a life is."""

    STARTING = 0
    ATTACHING = 1
    RESTORING = 2
    TRAINING = 3
    SAVING = 4
    CLOSING = 5
    ENDED = 6


@dataclass
class Trained:
    """What runs, for those who do something with it between two iterations."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ckpt: Checkpointer
    say: Callable[[int], None]
    iterate: Callable[[], None]  # one iteration, without ckpt.step()
    rewind: Callable[[], None]  # after a restore: a loader that was moved has to be iterated anew


Meddle = Callable[[Trained, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A life: `more` iterations after what is restored, then close. `saves`: the chance of ckpt.save() after each.

    `before` runs before attaching, `between` after each iteration with its number.
    """

    schedule: Path
    store: Path
    setting: Setting
    more: int = ITERATIONS
    saves: float = 0.0
    on_error: OnError = "raise"
    before: Callable[[], None] | None = None
    between: Meddle | None = None


def live(plan: Plan, path: Path) -> int:
    """In a forked process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    diary, chance = Diary(path), random.Random(os.getpid())
    diary.write(Entry(os.getpid()))
    if plan.before is not None:
        plan.before()
    model, optimizer = trainer_to_kill.build()
    loader = trainer_to_kill.batches()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ITERATIONS)
    batches = trainer_to_kill.endless(loader)

    def say(iteration: int) -> None:
        print(f"at {iteration} {trainer_to_kill.digest(model, optimizer, scheduler)}", flush=True)

    def rewind() -> None:
        nonlocal batches
        batches = trainer_to_kill.endless(loader)

    def iterate() -> None:
        trainer_to_kill.train(model, optimizer, *next(batches))
        scheduler.step()

    diary.note_phase(Phase.ATTACHING)
    setting = plan.setting
    with checkflow.attach(
        model, optimizer, schedule=plan.schedule, store=plan.store, scheduler=scheduler, loader=loader,
        slots=setting.slots, when_full=setting.when_full, persist_every=setting.persist_every,
        interval=setting.interval, on_error=plan.on_error, notify=lambda _: None, retry_s=RETRY_S,
    ) as ckpt:  # fmt: skip
        diary.note_phase(Phase.RESTORING)
        first = ckpt.restore()
        say(first)
        diary.write(Entry(os.getpid(), first, first, Phase.TRAINING, 0))
        trained = Trained(model, optimizer, ckpt, say, iterate, rewind)
        for iteration in range(first + 1, first + plan.more + 1):
            iterate()
            ckpt.step()
            diary.note(iteration)
            if plan.between is not None:
                plan.between(trained, iteration)
            if chance.random() < plan.saves:
                diary.note_phase(Phase.SAVING)
                ckpt.save(keep=False)
                diary.note_phase(Phase.TRAINING)
            diary.note_durable(ckpt.status().durable_iteration or 0)
        diary.note_phase(Phase.CLOSING)
    say(first + plan.more)
    diary.note_durable(first + plan.more)
    diary.note_phase(Phase.ENDED)
    return 0
