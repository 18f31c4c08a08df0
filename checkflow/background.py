"""Processes beside the one that the user started: never in its way on a busy machine, and gone without a trace."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

NICENESS = 10
_TRIES = 100
# By which somebody looks into the program: they make Python many times slower, or write all that it does to stderr.
_DEBUGGING = frozenset({
    "PYTHONASYNCIODEBUG", "PYTHONDEBUG", "PYTHONDEVMODE", "PYTHONDUMPREFS", "PYTHONDUMPREFSFILE", "PYTHONINSPECT",
    "PYTHONMALLOC", "PYTHONMALLOCSTATS", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC", "PYTHONVERBOSE",
})  # fmt: skip


def environment() -> dict[str, str]:
    """Of a Python process that nobody looks into, and that finds modules where this one does."""
    return {name: value for name, value in os.environ.items() if name not in _DEBUGGING} | {"PYTHONPATH": python_path()}


def python_path() -> str:
    """PYTHONPATH of a process that finds modules where this one does: of sys.path that is what strings there are."""
    return os.pathsep.join(path for path in sys.path if path and isinstance(path, str))


def give_way() -> None:
    """Of the process that calls it: let others run first."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError):  # where each session is a scheduling group, the group's niceness is what counts
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def remove_written(folder: Path) -> None:
    """Remove a folder into which another thread may be writing, which then finds none. What cannot be removed stays."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)  # fails where a file is made after it has looked
        if not folder.exists():
            return
