"""What an iteration hands on to the next though it is no state, as a person is told of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkflow.units import format_bytes


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A storage that a checkpoint would lack."""

    name: str  # the way that leads to it from the iteration's code, "ema.module.weight"; "" where none was found
    size_bytes: int
    where: str  # "train.py:31", the user's line that wrote it last; "" where no operator did
    scaler: bool = False  # a GradScaler's


def lines_of(found: Iterable[Unlisted], advice: str) -> tuple[str, ...]:
    """One for all that one line of code wrote; `advice`: what to do."""
    by_place: dict[tuple[str, bool], list[Unlisted]] = {}
    for one in found:
        by_place.setdefault((one.where, one.scaler), []).append(one)
    return tuple(_line(group, where, advice) for (where, _), group in by_place.items())


def _line(group: list[Unlisted], where: str, advice: str) -> str:
    first = group[0].name or "a tensor that no name leads to"
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    written = f", written at {where}" if where else ""
    size = format_bytes(sum(one.size_bytes for one in group))
    to_do = "give the GradScaler: attach(scaler=...)" if group[0].scaler else advice
    return f"{first}{more} ({size}{written}): carried from one iteration to the next, and in no checkpoint; {to_do}"
