"""Ctrl-C at a chosen line of the package, and what must not be left after it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from processes import children, descriptors

from checkflow.store.both.lock import StoreLock

if TYPE_CHECKING:
    from _typeshed import TraceFunction

PACKAGE = str(Path(__file__).parents[1] / "checkflow")


_OTHERS = [0]  # slots


@contextmanager
def interrupted_at(*lines: int) -> Iterator[list[int]]:
    """Within this, Ctrl-C comes when so many lines of the package were run, each time; yields the count."""
    count = [0]

    def local(_: FrameType, event: str, __: object) -> TraceFunction:
        if event == "line":
            count[0] += 1
            if count[0] in lines:
                signal.raise_signal(signal.SIGINT)
        return local

    def trace(frame: FrameType, _: str, __: object) -> TraceFunction | None:
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def plain_saver(folder: Path) -> Path:
    """A program in place of the saver's Python that listens to its socket only: a real one would take its time."""
    program = folder / "python"
    listen = "import os, sys\nwhile os.read(int(sys.argv[5]), 64) not in (b'', b'close'):\n    pass\n"
    program.write_text(f"#!{sys.executable} -IS\n{listen}")
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Slots that tests before have left, in a thread of theirs, are not this one's."""
    gc.collect()
    _OTHERS[:] = [_slots()]
    yield


def assert_nothing_is_left(store: Path) -> None:
    """Of what had the store: no process, no lock, no memory, no descriptor."""
    gc.collect()
    deadline = time.monotonic() + 60
    while children():
        assert time.monotonic() < deadline, "the saver does not end"
        time.sleep(0.005)
    StoreLock.acquire(store, lambda _: None, timeout_s=60).close()
    assert _slots() <= _OTHERS[0]
    assert not [name for name in descriptors(os.getpid()) if str(store) in name]


def _slots() -> int:
    """How often slots are mapped or open in this process."""
    names = list[str]()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(str(fd.readlink()))
    return sum("checkflow-slots" in each for each in (*names, *Path("/proc/self/maps").read_text().splitlines()))
