"""Processes beside training: they are never in its way on a busy machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICENESS = 10


def give_way() -> None:
    """Of the process that calls it: let others run first."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError):  # where each session is a scheduling group, the group's niceness is what counts
        Path("/proc/self/autogroup").write_text(str(NICENESS))
