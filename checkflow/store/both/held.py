"""Descriptors that are held for long by number.

A program may close all it has, as it does to become a daemon. Files that it opens get their numbers then, and must not
be written to, cut off or closed.
"""

from __future__ import annotations

import os


def same(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether both are of one file."""
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def is_still(fd: int, opened: os.stat_result) -> bool:
    """Whether a descriptor is of the file that it was opened for."""
    try:
        return same(os.fstat(fd), opened)
    except OSError:
        return False
