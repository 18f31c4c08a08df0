"""Descriptors that are held for long by number.

A program may close all it has, as it does to become a daemon. Files that it opens get their numbers then, and must not
be written to, cut off or closed.
"""

from __future__ import annotations

import os

FileId = tuple[int, int]


def file_id(fd: int) -> FileId:
    """Which file a descriptor is of. Raises OSError."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def is_still(fd: int, file: FileId) -> bool:
    """Whether a descriptor is of the file that it was opened for."""
    try:
        return file_id(fd) == file
    except OSError:
        return False
