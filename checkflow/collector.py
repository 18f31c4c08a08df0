"""Python's collector of cycles, kept from looking where there is nothing for it."""

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


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Imports of a process of our own, which last as long as it does: no collection looks at them, then or later.

    Nor at what was there before them.
    """
    with paused_collector():
        yield
    gc.freeze()


def process_ends() -> None:
    """To be called last in a process of our own: all its memory goes at once, and no collection looks through it first.

    With torch imported, that is a good part of a short command.
    """
    gc.disable()
    gc.freeze()


def _collect_in_child() -> None:
    if _paused:
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)
