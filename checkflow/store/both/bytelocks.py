"""Locks of single bytes that belong to an open file description: they go with its last descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from checkflow.errors import StoreError

_FLOCK = "@hhqqi"  # struct flock: type, whence, start, length, pid (0 for these locks)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)


def take(fd: int, byte: int) -> bool:
    """Lock a byte of a file open for writing, and return whether nobody else had it.

    Raises StoreError where the file system has no locks.
    """
    try:
        _set(fd, byte, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise StoreError(f"lock: the file system refuses locks ({error.strerror}); choose another store") from None
    return True


def take_of_directory(fd: int, byte: int) -> bool:
    """The same of a directory, which nobody can open for writing: of two that come at once, none may have it.

    Each puts a read lock there first, and looks for another's afterwards. True also where the file system has no such
    locks.
    """
    try:
        _set(fd, byte, fcntl.F_RDLCK)
        if not is_held(fd, byte):
            return True
        _set(fd, byte, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        raise StoreError(f"lock: the file system refuses locks ({error.strerror}); choose another store") from None
    return False


def is_held(fd: int, byte: int) -> bool:
    """Whether another open file description has a lock of either kind on it. Raises OSError."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, byte))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _set(fd: int, byte: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack(kind, byte))


def _pack(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
