"""What an iteration hands on to the next though it is no state, as a person is told of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkflow.units import format_bytes

GRADIENT = "grad"  # the last part of a gradient's name


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A storage that a checkpoint would lack."""

    name: str  # the way to it, or to the deque that has it, from the code, "ema.module.weight"; "" where none was found
    size_bytes: int
    where: str  # "train.py:31", the user's line that wrote it last; "" where no operator did
    scaler: bool = False  # a GradScaler's

    @property
    def is_gradient(self) -> bool:
        """Which nobody can list: at each update it is another tensor."""
        return self.name.rpartition(".")[2] == GRADIENT

    @property
    def variable(self) -> str:
        """The one that leads to it, "ema"; of all gradients the same."""
        return GRADIENT if self.is_gradient else self.name.removeprefix("self.").partition(".")[0]


def lines_of(found: Iterable[Unlisted], advice: str) -> tuple[str, ...]:
    """One for all of one variable that one line of code wrote; `advice`: what to do."""
    by_place: dict[tuple[str, bool, str], list[Unlisted]] = {}
    for one in found:
        by_place.setdefault((one.where, one.scaler, one.variable), []).append(one)
    return tuple(_line(group, where, advice) for (where, *_), group in by_place.items())


def hook_line(name: str, state: object) -> str:
    """Of what a communication hook of a DistributedDataParallel keeps."""
    return (
        f"{name}: what its communication hook keeps ({type(state).__name__}) is in no checkpoint, so a resumed run "
        "will differ; list an object that gives and takes it: attach(extra={...})"
    )


def _line(group: list[Unlisted], where: str, advice: str) -> str:
    first = group[0].name or "a tensor that no name leads to"
    others = sum(one.name != first for one in group[1:])  # a deque's items have its name
    more = f" and {others} more" if others else ""
    written = f", written at {where}" if where else ""
    size = format_bytes(sum(one.size_bytes for one in group))
    if group[0].scaler:
        advice = "give the GradScaler: attach(scaler=...)"
    elif group[0].is_gradient:
        of_its_own = f"keep it in a tensor of your own and {advice}"
        advice = f"call step() after the update that uses it or, where it is never dropped, {of_its_own}"
    return f"{first}{more} ({size}{written}): carried from one iteration to the next, and in no checkpoint; {advice}"
