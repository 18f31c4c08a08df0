"""The last losses, which each checkpoint holds, so that it shows after a resume whether training goes on where it was.

A loss on a device is copied without waiting: it is known an iteration or two later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from checkflow.errors import InputError
from checkflow.text import brief

KEPT = 10  # in a checkpoint
COMPARED = 2  # after a resume
_LEAST = 3  # before it, to compare with
_SAME_PER_CENT = 1  # where those before were all alike


@dataclass(frozen=True, slots=True)
class Compared:
    """Losses before a resume, of iterations that its checkpoint holds, and after it; oldest first."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def goes_on(self) -> bool:
        """Whether the mean of those after is no further from those before than these are from each other."""
        low, high = min(self.before), max(self.before)
        margin = max(high - low, abs(high) * _SAME_PER_CENT / 100)
        mean = sum(self.after) / len(self.after)
        return low - margin <= mean <= high + margin  # False of what is not a number


class Losses:
    """One for each attached training: `add` at each iteration's end, `known` for its checkpoint."""

    def __init__(self) -> None:
        self._known: deque[float] = deque(maxlen=KEPT)
        self._coming: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._before: tuple[float, ...] = ()
        self._after: list[float] = []

    def add(self, loss: object) -> None:
        """Of the iteration that ended: a number, or a tensor of one. Raises InputError for anything else."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.device.type == "cuda":
            self._copy(loss.detach())
        else:
            self._take(_number(loss))

    @property
    def known(self) -> tuple[float, ...]:
        """The last ones that are numbers and have arrived, oldest first."""
        self._arrive()
        return tuple(self._known)

    def resumed(self, before: Sequence[float]) -> None:
        """The state is another iteration's, whose checkpoint held these."""
        self._coming.clear()
        self._known = deque(before, maxlen=KEPT)
        self._before, self._after = tuple(before), []

    def compared(self) -> Compared | None:
        """Once, when enough are known of after a resume."""
        self._arrive()
        if len(self._before) < _LEAST or len(self._after) < COMPARED:
            return None
        found, self._before = Compared(self._before, tuple(self._after)), ()
        return found

    def _copy(self, loss: torch.Tensor) -> None:
        here = torch.empty((), dtype=torch.float64, pin_memory=True)
        here.copy_(loss.reshape(()), non_blocking=True)
        self._coming.append((here, torch.cuda.current_stream(loss.device).record_event()))

    def _arrive(self) -> None:
        while self._coming and self._coming[0][1].query():  # type: ignore[no-untyped-call]
            self._take(self._coming.popleft()[0].item())

    def _take(self, loss: float) -> None:
        if self._before and len(self._after) < COMPARED:
            self._after.append(loss)
        if math.isfinite(loss):
            self._known.append(loss)


def _number(loss: object) -> float:
    """Raises InputError for what is none, and for one of which no float can be made."""
    try:
        value = loss.detach().item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss
        if isinstance(value, Real):
            return float(value)
    except Exception as error:  # noqa: BLE001 (too large, a tensor without memory, or anybody's number)
        why = f"{_kind(loss)} without a value ({brief(error)})"
    else:
        why = _kind(value)
    raise InputError(f"step: loss is {why}; give a number or a tensor of one element")


def _kind(loss: object) -> str:
    return f"a tensor of {loss.numel()} elements" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
