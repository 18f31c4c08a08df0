"""Which checkpoints every rank has a part of.

Parts belong together where their marks are the same: of one iteration, and of one attempt. A number of the attempt is
agreed on at attach and at each restore, so that parts of one iteration that was trained twice are never mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from checkflow.errors import InputError, shown
from checkflow.store.format.manifest import MAX_FILE_BYTES


class Mark(NamedTuple):
    """Of a checkpoint; of several ranks a later one is greater. What one process took before there were several has
    attempt 0, and of two of its own the mark does not say which is later: it may have gone back."""

    attempt: int
    iteration: int


class Dated(NamedTuple):
    """When one process wrote what has attempt 0; greater is later. `created`: by its manifest, to the second."""

    created: str
    is_on_disk: bool  # else in a bucket, whose serials are others
    serial: int


def age(mark: Mark, serial: int) -> tuple[int, int, int]:
    """A later checkpoint's is greater, in one store or one bucket. `serial`: of what one process wrote."""
    return mark.attempt, 0 if mark.attempt else serial, mark.iteration


def newest_first(marks: Iterable[Mark], written: Mapping[Mark, Dated]) -> list[Mark]:
    """Of all places. `written`: of those of attempt 0."""
    never = Dated("", False, 0)
    order = {
        mark: (mark.attempt, never if mark.attempt else written.get(mark, never), mark.iteration) for mark in marks
    }
    return sorted(order, key=order.__getitem__, reverse=True)


def common(held: Sequence[Iterable[Mark]]) -> tuple[Mark, ...]:
    """What each rank has, newest first; `held`: by rank."""
    sets = [set(marks) for marks in held]
    return tuple(sorted(set.intersection(*sets), reverse=True)) if sets else ()


def next_attempt(held: Iterable[Iterable[Mark]]) -> int:
    """A number that no checkpoint of any rank has."""
    return 1 + max((mark.attempt for marks in held for mark in marks), default=0)


def check_iteration(iteration: object) -> None:
    """Raises InputError for one that no checkpoint can be of; None is the newest, or the next."""
    if iteration is not None and (type(iteration) is not int or not 0 <= iteration <= MAX_FILE_BYTES):
        raise InputError(f"iteration: is {shown(iteration, 80)}; give how many are completed, 0 or more")
