"""How a training is attached, and how many completed iterations it may lose then."""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.store.memory.trainer_slots import WhenFull
from checkflow.store.trainer.persist_every import PersistEvery


@dataclass(frozen=True, slots=True)
class Setting:
    """`trainer`, `everything`: the most that their death costs, as README.md promises; None: nothing is promised."""

    name: str
    slots: int = 3
    when_full: WhenFull = "skip"
    persist_every: PersistEvery = PersistEvery()  # noqa: RUF009 (frozen)
    interval: int = 1
    trainer: int | None = None
    everything: int | None = None


_EACH = PersistEvery(iterations=1)
SETTINGS = (
    Setting("nothing said", trainer=1),
    Setting("slots=2 wait, persist each", 2, "wait", _EACH, trainer=1, everything=3),
    Setting("slots=1 wait", 1, "wait", trainer=1, everything=2),
    Setting("slots=2 skip", 2, "skip"),
    Setting("slots=1 skip", 1, "skip"),
    Setting("persist each", 3, "skip", _EACH, trainer=1),
    Setting("slots=3 wait, persist each", 3, "wait", _EACH, trainer=1),
    Setting("interval=3", 3, "skip", interval=3, trainer=5),
    Setting("interval=3, slots=2 wait, persist each", 2, "wait", _EACH, interval=3, trainer=5),
)
"""The first three are README's table; at an interval of k a trainer loses at most 2k - 1."""
