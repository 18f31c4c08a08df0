"""Python's collector of cycles, kept out of a stretch of work."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """No collection begins in the body. A full one looks at all of torch, which takes a fifth of a second."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
