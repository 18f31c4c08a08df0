"""Which checkpoints stay on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkflow.errors import InputError


@dataclass(frozen=True, slots=True)
class Retention:
    """Retain the newest `last`, those at a multiple of `every` iterations, and those that the user marked."""

    last: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise InputError(f"retention: last={self.last} would remove the newest checkpoint; use 1 or more")
        if self.every is not None and self.every < 1:
            raise InputError(f"retention: every={self.every} is not positive; use a number of iterations, or None")


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention needs to know of a checkpoint; `sound` is False where it did not read back as written."""

    serial: int
    iteration: int
    keep: bool
    sound: bool = True


def to_prune(checkpoints: Iterable[Retained], verified_serial: int, retention: Retention) -> tuple[int, ...]:
    """Serials to remove, now that `verified_serial` verifies; never that one, a newer one, or one that is not sound.

    One that is not sound is left for a person to look at: `checkflow check --repair` removes it.
    """
    older = [checkpoint for checkpoint in checkpoints if checkpoint.sound and checkpoint.serial < verified_serial]
    newest = {checkpoint.serial for checkpoint in sorted(older, key=lambda found: -found.serial)[: retention.last - 1]}
    return tuple(
        checkpoint.serial
        for checkpoint in sorted(older, key=lambda found: found.serial)
        if checkpoint.serial not in newest
        and not checkpoint.keep
        and not (retention.every and checkpoint.iteration % retention.every == 0)
    )
