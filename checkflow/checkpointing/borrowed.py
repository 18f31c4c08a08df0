"""Other ranks' parts that were downloaded for a restore. They go once every rank has one of its own, made since.

What is borrowed has a file in it with the number of the attempt that reads it, so that a later run knows, too. A
directory in which anything else lies, or where a training was, is somebody's own, and is left alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from checkflow.errors import StoreError
from checkflow.store.both.lock import LOCK
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.ranks import directory_of, ranks_in
from checkflow.store.format.reader import checkpoint_names
from checkflow.store.format.writer import remove_checkpoint

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
                with contextlib.suppress(OSError):  # another rank does the same
                    remove_checkpoint(LocalDisk(), path)
                    path.parent.rmdir()  # where it was made for it

    def _given_back(self, attempt: int) -> Iterator[Path]:
        ranks = (self._root / directory_of(rank, size) for size, its in ranks_in(self._root).items() for rank in its)
        for store in (self._root, *ranks):
            with contextlib.suppress(OSError, StoreError, ValueError):  # another rank has just removed it; no number
                is_own = store == self._own or (store / LOCK).exists()  # or was
                found = [] if is_own else [store / name for name in checkpoint_names(store)]
                if all(int((path / BORROWED).read_text()) <= attempt for path in found):
                    yield from found
