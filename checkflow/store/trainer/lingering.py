"""Where a person waits for long it is said what for, once: by `tell`, for there is nothing to see to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

PATIENT_S = 5.0  # that nobody needs to be told of


class Lingering:
    """Of one wait at this place, which begins now."""

    def __init__(self, place: Path | str, tell: Callable[[str], None]) -> None:
        self._place = place
        self._tell = tell
        self._due_s = time.monotonic() + PATIENT_S

    def until(self, what: str) -> None:
        """To be called again and again while it waits for this."""
        if time.monotonic() >= self._due_s:
            self._due_s = math.inf
            self._tell(f"{self._place}: waiting until {what}")
