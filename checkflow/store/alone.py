"""Writing a checkpoint without a saver: in this process, under the store's locks, while somebody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from checkflow.errors import StoreError
from checkflow.store.both.lock import StoreLock
from checkflow.store.format import begun as steps
from checkflow.store.format.begun import Begun, NewFile
from checkflow.store.format.disk import LocalDisk, remove_tree
from checkflow.store.format.manifest import Manifest

_LOCK_S = 600.0  # for the saver of a run before


def begin(store: Path, files: Iterable[NewFile], notify: Callable[[str], None]) -> Begun:
    """The first of two steps: a checkpoint's files, on the device. Raises StoreError, StoreBusyError."""
    with _held(store, notify):
        steps.remove_leftovers(LocalDisk(), store)
        return steps.begin(LocalDisk(), store, files)


def publish(
    begun: Begun, iteration: int, record: bytes, versions: dict[str, str], notify: Callable[[str], None]
) -> Manifest:
    """The second: it is a checkpoint, and durable, once this returns. Raises StoreError, StoreBusyError."""
    with _held(begun.store, notify):
        return steps.publish(LocalDisk(), begun, iteration, record, versions)


def discard(begun: Begun) -> None:
    """Of one that will not be published; what cannot be removed the store's next writer removes."""
    with contextlib.suppress(OSError):
        remove_tree(LocalDisk(), begun.directory)


@contextlib.contextmanager
def _held(store: Path, notify: Callable[[str], None]) -> Iterator[None]:
    lock = StoreLock.acquire(store, notify, _LOCK_S)
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise StoreError(
            f"{store}: the checkpoint cannot be made durable ({error.strerror}{where}); free space or check the disk; "
            "what was durable before still is"
        ) from None
    finally:
        lock.close()
