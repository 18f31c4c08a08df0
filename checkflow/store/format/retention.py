"""Which checkpoints stay on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkflow.errors import InputError
from checkflow.units import whole_number


@dataclass(frozen=True, slots=True)
class Retention:
    """Retain the newest `last`, those at a multiple of `every` iterations, and those that the user marked.

    Raises InputError for what is no such number.
    """

    last: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        last = whole_number(self.last, "retention: last", "give how many to retain")
        if last < 1:
            raise InputError(f"retention: last={last} would remove the newest checkpoint; use 1 or more")
        object.__setattr__(self, "last", last)
        if self.every is None:
            return
        every = whole_number(self.every, "retention: every", "give a number of iterations, or None")
        if every < 1:
            raise InputError(f"retention: every={every} is not positive; use a number of iterations, or None")
        object.__setattr__(self, "every", every)


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention needs to know of a checkpoint; `sound` is False where it did not read back as written."""

    serial: int
    iteration: int
    keep: bool
    sound: bool = True


def counted(checkpoints: Iterable[Retained], verified_serial: int, retention: Retention) -> tuple[int, ...]:
    """Serials of those that are, with `verified_serial`, the newest `last`; newest first."""
    older = [each.serial for each in checkpoints if each.sound and each.serial < verified_serial]
    return tuple(sorted(older, reverse=True)[: retention.last - 1])


def to_prune(checkpoints: Iterable[Retained], verified_serial: int, retention: Retention) -> tuple[int, ...]:
    """Serials to remove, now that `verified_serial` verifies; never that one, a newer one, or one that is not sound.

    One that is not sound is left for a person to look at: `checkflow check --repair` removes it.
    """
    checkpoints = tuple(checkpoints)
    older = [checkpoint for checkpoint in checkpoints if checkpoint.sound and checkpoint.serial < verified_serial]
    newest = counted(checkpoints, verified_serial, retention)
    return tuple(
        checkpoint.serial
        for checkpoint in sorted(older, key=lambda found: found.serial)
        if checkpoint.serial not in newest
        and not checkpoint.keep
        and not (retention.every and checkpoint.iteration % retention.every == 0)
    )
