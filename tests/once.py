"""What many tests look at and takes long to make: the first worker that needs it makes it, the others wait."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """A folder of this run of the suite, filled. Where that raised, the next one who asks tries in another."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with (base / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not (filled := lock.read()):
            folder = factory.mktemp(name)
            fill(folder)
            filled = str(folder)
            lock.write(filled)
    return Path(filled)
