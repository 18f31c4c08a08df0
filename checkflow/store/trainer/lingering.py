"""Where a person waits for long it is said what for, once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PATIENT_S = 5.0  # that nobody needs to be told of


class Lingering:
    """Of one wait, which begins now."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._due_s = time.monotonic() + PATIENT_S

    def until(self, what: str) -> None:
        """To be called again and again while it waits for this."""
        if time.monotonic() >= self._due_s:
            self._due_s = math.inf
            self._say(f"waiting until {what}")
