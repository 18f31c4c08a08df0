"""Which anchors fired in this iteration, and which number each firing has in the schedule."""

from __future__ import annotations

from collections import Counter

from checkflow.runtime.timetable import Timetable


class Firings:
    """Counts firings; they begin anew when an iteration ends."""

    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable
        self._counts: Counter[tuple[str, str]] = Counter()
        self._fired: set[int] = {timetable.anchor_count}
        self.silent: frozenset[int] = frozenset()  # anchors that the schedule uses and that did not fire lately

    def fire(self, kind: str, subject: str) -> int | None:
        """The number of this firing's anchor; None for one that the schedule does not know."""
        key = kind, subject
        self._counts[key] += 1
        number = self._timetable.anchors.get(key, {}).get(self._counts[key])
        if number is not None:
            self._fired.add(number)
        return number

    def end(self) -> None:
        """The iteration ended."""
        self.silent = self._timetable.used - self._fired
        self._counts.clear()
        self._fired = {self._timetable.anchor_count}
