"""The C library's calls that Python does not have, or makes with the interpreter's lock held."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


def raise_unless(succeeded: bool, *tolerated: int) -> None:
    """Raise OSError for the last call's error, unless it succeeded or its error is one of these."""
    if not succeeded and (error := ctypes.get_errno()) not in tolerated:
        raise OSError(error, os.strerror(error))


def call(function: Callable[..., int], *arguments: object) -> int:
    """What a call of the C library answers; again for as long as a signal interrupts it, as Python's own calls."""
    while True:
        ctypes.set_errno(0)
        answer = function(*arguments)
        if answer != -1 or ctypes.get_errno() != errno.EINTR:
            return answer
