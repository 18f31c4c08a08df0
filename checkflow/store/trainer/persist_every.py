"""How often a staged checkpoint becomes due to be persisted.

Staging protects against a killed trainer and costs no disk; persisting protects against a lost machine, and wears the
disk out. So by default it is done as often as costs nothing: at most a tenth of the time is spent on it, and never more
often than every 30 seconds (1 GiB each 30 seconds is 3 TB a day). However slow the disk, it is done every 10 minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.errors import InputError
from checkflow.units import real_number, whole_number

BUSY_FRACTION = 0.1
LEAST_S, MOST_S = 30.0, 600.0


@dataclass(frozen=True, slots=True)
class PersistEvery:
    """`iterations` or `seconds` from one persisted checkpoint to the next; neither: as often as costs nothing.

    Raises InputError for what is no such number.
    """

    iterations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.iterations is not None and self.seconds is not None:
            raise InputError("persist_every: iterations and seconds are both given; give one")
        if self.iterations is not None:
            iterations = whole_number(self.iterations, "persist_every: iterations", "give 1 or more")
            if iterations < 1:
                raise InputError(f"persist_every: {iterations} iterations is not positive; use 1 or more")
            object.__setattr__(self, "iterations", iterations)
        if self.seconds is not None:
            seconds = real_number(self.seconds, "persist_every: seconds", "give 0 or more")
            if seconds < 0:
                raise InputError(f"persist_every: {self.seconds} seconds is negative; use 0 or more")
            object.__setattr__(self, "seconds", seconds)

    def in_words(self) -> str:
        """ "each 30 s"."""
        if self.iterations is not None:
            return "at once" if self.iterations == 1 else f"every {self.iterations} iterations"
        if self.seconds is not None:
            return f"each {self.seconds:g} s" if self.seconds else "at once"
        return f"each {LEAST_S:g} s, on a slow disk up to each {MOST_S:g} s"


class Pace:
    """Decides for each staged checkpoint, in order, whether it is due."""

    def __init__(self, every: PersistEvery) -> None:
        self._every = every
        self._last_iteration = 0  # the newest that was staged, or restored
        self._last_s: float | None = None

    def due(self, iteration: int, now_s: float, last_persist_s: float) -> bool:
        """`last_persist_s`: how long the last one took to be written and read back, 0 if unknown.

        Every N iterations means at each multiple of N, or at the first staged iteration after it.
        """
        if self._every.iterations is not None:
            before = min(self._last_iteration, iteration - 1)  # of an attempt that nothing was restored of it is later
            due = iteration // self._every.iterations > before // self._every.iterations
            self._last_iteration = iteration
            return due
        gap_s = self._every.seconds
        if gap_s is None:
            gap_s = min(max(LEAST_S, last_persist_s / BUSY_FRACTION), MOST_S)
        if self._last_s is not None and now_s - self._last_s < gap_s:
            return False
        self._last_s = now_s
        return True

    def restored(self, iteration: int) -> None:
        """What comes next follows this one."""
        self._last_iteration = iteration

    def ruled(self, iteration: int, now_s: float, *, due: bool) -> None:
        """Another one has decided for this one."""
        self._last_iteration = iteration
        if due:
            self._last_s = now_s
