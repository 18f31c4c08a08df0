"""How long a process that has work has not moved, as far as anybody looked."""

from __future__ import annotations

import time

LOOKS = 4  # it takes more than so many in a row to tell that one hangs


class Stillness:
    """Who looks may itself have been stopped, with the other or alone, or have had something else to do for long: the
    time between two looks counts for no more than a quarter of `limit_s`, and for nothing where there was nothing to do
    at the first."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._progress: object = None
        self._seen_s = 0.0  # time.monotonic
        self._still_s = 0.0

    def exceeds(self, progress: object) -> bool:
        """Look. `progress`: how far it is, None where it has nothing to do."""
        now = time.monotonic()
        if progress is None or progress != self._progress:
            self._still_s = 0.0
        else:
            self._still_s += min(now - self._seen_s, self._limit_s / LOOKS)
        self._progress, self._seen_s = progress, now
        return self._still_s > self._limit_s
