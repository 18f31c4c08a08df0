"""Which processes there are, as /proc says: any of them may end while it is read; and what is waited for."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def runs(pid: int) -> bool:
    """A zombie does not: it only waits for its parent, or whoever adopted it, to collect it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descriptors(pid: int) -> set[str]:
    """What a process has open, by name."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(fd.readlink()))
    return found


def children(pid: int | None = None) -> set[int]:
    """Those of a process, or of this one, that run; but for those that multiprocessing starts once and keeps."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{os.getpid() if pid is None else pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found |= {int(child) for child in (task / "children").read_text().split()}
    return {child for child in found if runs(child) and not any(name in command(child) for name in _KEPT)}


def until(holds: Callable[[], bool], longest_s: float = 20.0) -> None:
    """Wait for what another thread or process brings about."""
    deadline = time.monotonic() + longest_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def descendants(pid: int) -> set[int]:
    """Its children that run, theirs, and so on."""
    found = children(pid)
    return found.union(*(descendants(child) for child in found))


@contextmanager
def refusing(saver: int) -> Iterator[None]:
    """The disk takes not a byte from this saver here, as if it were full."""
    before = resource.prlimit(saver, resource.RLIMIT_FSIZE)
    resource.prlimit(saver, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        if runs(saver):
            resource.prlimit(saver, resource.RLIMIT_FSIZE, before)
