"""What writers did not finish: the store's next one removes it, unless its own goes on with it."""

from __future__ import annotations

import os
from pathlib import Path

from checkflow.store.both.bytelocks import is_held, take_of_directory
from checkflow.store.format.disk import Disk, remove_tree
from checkflow.store.format.writer import INCOMPLETE, PRUNED

_BEGUN = 0  # the byte of a checkpoint's directory that is locked while its writer goes on with it


def hold(directory: Path) -> int:
    """A descriptor; until it is closed, or its process has ended, no writer takes the directory for a leftover.

    A file system without locks of directories holds nothing. Raises OSError, StoreError.
    """
    fd = _opened(directory)
    try:
        take_of_directory(fd, _BEGUN)
    except BaseException:
        os.close(fd)
        raise
    return fd


def leftovers(store: Path, names: tuple[str, ...] = (INCOMPLETE, PRUNED)) -> list[Path]:
    """What killed or failed writers left half-written or half-removed; not what one holds. Raises OSError."""
    return [path for path in sorted(store.iterdir()) if path.name.startswith(names) and not _is_held(path)]


def remove_leftovers(disk: Disk, store: Path) -> None:
    """One that cannot be removed does not keep the others. Raises OSError, the first one's, at the end."""
    failed: OSError | None = None
    for path in leftovers(store):
        try:
            remove_tree(disk, path)
        except OSError as error:
            failed = failed or error  # the others may still make room
    if failed is not None:
        raise failed


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_held(path: Path) -> bool:
    try:
        fd = _opened(path)
    except OSError:  # no directory
        return False
    try:
        return is_held(fd, _BEGUN)
    except OSError:  # no such locks
        return False
    finally:
        os.close(fd)
