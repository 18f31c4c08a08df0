"""Which checkpoints every rank has a part of.

Parts belong together where their marks are the same: of one iteration, and of one attempt. A number of the attempt is
agreed on at attach and at each restore, so that parts of one iteration that was trained twice are never mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Mark(NamedTuple):
    """Of a checkpoint; a later one is greater."""

    attempt: int
    iteration: int


def common(held: Sequence[Iterable[Mark]]) -> tuple[Mark, ...]:
    """What each rank has, newest first; `held`: by rank."""
    sets = [set(marks) for marks in held]
    return tuple(sorted(set.intersection(*sets), reverse=True)) if sets else ()


def next_attempt(held: Iterable[Iterable[Mark]]) -> int:
    """A number that no checkpoint of any rank has."""
    return 1 + max((mark.attempt for marks in held for mark in marks), default=0)
