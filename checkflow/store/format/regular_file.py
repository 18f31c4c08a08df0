"""Opening files of the store. Anybody may have put something else in their place: a link, a pipe, a directory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_NO_FILE = "it is no regular file"
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR}


def open_regular(path: Path | str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file: links are not followed, nothing holds us up. Raises OSError for anything else."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, not a file", str(path)) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a pipe that nobody reads; a directory
            raise OSError(error.errno, _NO_FILE, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENOTSUP, _NO_FILE, str(path))
    return fd


def is_scarcity(error: OSError) -> bool:
    """Whether this process or machine lacks something at the moment, which says nothing about a file or a disk."""
    return error.errno in _SCARCE


def read_at(fd: int, start_bytes: int, size_bytes: int) -> bytes:
    """So many bytes of a file, or those that it has. Raises OSError."""
    parts: list[bytes] = []
    while size_bytes and (part := os.pread(fd, size_bytes, start_bytes)):
        parts.append(part)
        start_bytes, size_bytes = start_bytes + len(part), size_bytes - len(part)
    return b"".join(parts)
