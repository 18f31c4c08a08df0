"""Python's collector of cycles, kept out of a stretch of work."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

_paused = 0  # bodies that are running


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """No collection begins in the body. A full one looks at all of torch, which takes a fifth of a second.

    What the body forks, a loader's workers, collects as ever.
    """
    global _paused
    collecting = gc.isenabled()
    gc.disable()
    _paused += collecting
    try:
        yield
    finally:
        _paused -= collecting
        if collecting:
            gc.enable()


def _collect_in_child() -> None:
    if _paused:
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)
