"""The C library's calls that Python does not have, or makes with the interpreter's lock held."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = LIBC.signal.restype = ctypes.c_void_p
_EMPTY_PATH, _BIRTH = 0x1000, 0x800  # AT_EMPTY_PATH, STATX_BTIME


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


def birth_ns(fd: int) -> int:
    """When a file or directory was made, in ns since 1970; 0 where the file system does not say (statx(2))."""
    if not hasattr(LIBC, "statx"):
        return 0
    answer = ctypes.create_string_buffer(256)
    if call(LIBC.statx, fd, b"", _EMPTY_PATH, _BIRTH, answer):
        return 0
    (mask,), (seconds, ns) = struct.unpack_from("=I", answer), struct.unpack_from("=qI", answer, 80)
    return seconds * 10**9 + ns if mask & _BIRTH else 0


def end_by(number: signal.Signals) -> None:
    """End this process as a signal does that nobody handles. From any thread: signal.signal is the main one's."""
    LIBC.signal(int(number), None)  # SIG_DFL
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a container's first process comes here
