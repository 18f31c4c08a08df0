"""The C library's calls that Python does not have, or makes with the interpreter's lock held."""

from __future__ import annotations

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


def raise_unless(succeeded: bool, *tolerated: int) -> None:
    """Raise OSError for the last call's error, unless it succeeded or its error is one of these."""
    if not succeeded and (error := ctypes.get_errno()) not in tolerated:
        raise OSError(error, os.strerror(error))
