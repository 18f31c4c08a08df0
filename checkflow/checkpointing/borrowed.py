"""Other ranks' parts that were downloaded for a restore. They go once every rank has one of its own, made since.

What is borrowed has a file beside it with the number of the attempt that reads it, so that a later run knows, too. A
directory that a training writes to is left to its own saver, which prunes what is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from checkflow.errors import StoreError
from checkflow.store.both.lock import LOCK, StoreLock
from checkflow.store.format.disk import LocalDisk, remove_tree
from checkflow.store.format.ranks import directory_of, ranks_in
from checkflow.store.format.reader import checkpoint_names
from checkflow.store.format.writer import PRUNED

BORROWED = "borrowed"  # the file


class Borrowed:
    """Of one rank, which writes to the directory `own` in `root`."""

    def __init__(self, root: Path, own: Path) -> None:
        self._root = root
        self._own = own
        self._attempt = -1  # of which every rank has verified a checkpoint
        self._thread: threading.Thread | None = None

    @staticmethod
    def add(path: Path, attempt: int) -> None:
        """A checkpoint that a restore of this attempt reads. One that cannot be marked stays."""
        with contextlib.suppress(OSError):
            (path / BORROWED).write_text(f"{attempt}\n")

    def give_back(self, attempt: int) -> None:
        """Every rank has verified a checkpoint of this attempt: nobody reads what was borrowed up to it. Does not
        wait."""
        if attempt > self._attempt and (self._thread is None or not self._thread.is_alive()):
            self._attempt = attempt
            self._thread = threading.Thread(
                target=self._remove, args=(attempt,), name="checkflow-borrowed", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait until what is given back is gone."""
        if self._thread is not None:
            self._thread.join()

    def _remove(self, attempt: int) -> None:
        with contextlib.suppress(OSError, StoreError):  # it stays until another run removes it
            for path in list(self._given_back(attempt)):
                with contextlib.suppress(OSError, StoreError):  # it is in use
                    _remove_unused(path)

    def _given_back(self, attempt: int) -> Iterator[Path]:
        ranks = (self._root / directory_of(rank, size) for size, its in ranks_in(self._root).items() for rank in its)
        for store in (self._root, *ranks):
            for name in checkpoint_names(store) if store != self._own else ():
                mark = store / name / BORROWED
                with contextlib.suppress(FileNotFoundError, ValueError):
                    if int(mark.read_text()) <= attempt:
                        yield store / name


def remove_checkpoint(path: Path) -> None:
    """It is gone at once, and its bytes soon after. Raises OSError."""
    disk = LocalDisk()
    hidden = path.with_name(PRUNED + path.name)
    disk.rename(path, hidden)
    disk.sync_directory(path.parent)
    remove_tree(disk, hidden)


def _remove_unused(path: Path) -> None:
    """And its directory, where that was made for it. Raises StoreError where a training has the directory, OSError."""
    was_locked = (path.parent / LOCK).exists()
    lock = StoreLock.acquire(path.parent, lambda _: None, timeout_s=0.0)
    try:
        remove_checkpoint(path)
        if not was_locked:
            (path.parent / LOCK).unlink()
            path.parent.rmdir()
    finally:
        lock.close()
