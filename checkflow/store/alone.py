"""Writing a checkpoint without a saver: in this process, under the store's locks, while somebody waits for it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from checkflow.errors import StoreBusyError, StoreError, reason, remedy
from checkflow.store.both.leftovers import hold, remove_leftovers
from checkflow.store.both.lock import StoreLock
from checkflow.store.format import begun as steps
from checkflow.store.format.begun import Begun, NewFile
from checkflow.store.format.disk import LocalDisk, remove_tree
from checkflow.store.format.manifest import Manifest

_LOCK_S = 600.0  # for the saver of a run before
_TURN = threading.Lock()  # threads of one process wait for each other, where other processes are refused


class UnderWay:
    """What has begun and has not ended: no other writer removes it while this lives, and it goes with this."""

    def __init__(self, begun: Begun) -> None:
        self.begun = begun
        self._end = weakref.finalize(self, _let_go, begun, hold(begun.directory), os.getpid())
        self._end.atexit = False  # a process that ends leaves it to the store's next writer

    def end(self) -> None:
        """Remove what is there under its first name; what cannot be removed the store's next writer removes."""
        self._end()


def begin(store: Path, files: Iterable[NewFile], notify: Callable[[str], None]) -> UnderWay:
    """The first of two steps: a checkpoint's files, on the device. Raises StoreError, StoreBusyError."""
    with _held(store, notify):
        try:
            remove_leftovers(LocalDisk(), store)
        except OSError as error:
            notify(f"{store}: leftovers cannot be removed ({reason(error)}); {remedy(error, 'remove them yourself')}")
        return UnderWay(steps.begin(LocalDisk(), store, files))


def publish(
    under_way: UnderWay, iteration: int, record: bytes, versions: dict[str, str], notify: Callable[[str], None]
) -> Manifest:
    """The second: it is a checkpoint, and durable, once this returns. Raises StoreError, StoreBusyError."""
    begun = under_way.begun
    try:
        with _held(begun.store, notify):
            if not begun.directory.exists():  # where the file system has no locks that tell
                raise StoreBusyError(
                    f"{begun.store}: another writer came in between, and removed what was written so far; let one at "
                    "a time write to it, and save again"
                )
            return steps.publish(LocalDisk(), begun, iteration, record, versions)
    finally:
        under_way.end()


def _let_go(begun: Begun, held_fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no part in it
        with contextlib.suppress(OSError):
            remove_tree(LocalDisk(), begun.directory)
    os.close(held_fd)


@contextlib.contextmanager
def _held(store: Path, notify: Callable[[str], None]) -> Iterator[None]:
    with _TURN:
        lock = StoreLock.acquire(store, notify, _LOCK_S)
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{store}: the checkpoint cannot be made durable ({reason(error)}); "
                f"{remedy(error, 'check the disk')}; what was durable before still is"
            ) from None
        finally:
            lock.close()
