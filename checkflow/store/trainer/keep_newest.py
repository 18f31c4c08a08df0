"""Retaining for good what was written without being marked so."""

from __future__ import annotations

from pathlib import Path

from checkflow.errors import StoreError
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.manifest import KEPT
from checkflow.store.format.reader import Checkpoint, newest


def keep_newest(store: Path) -> Checkpoint:
    """Have retention leave the newest checkpoint that verifies alone, in this run and in later ones.

    Raises CorruptStoreError where none verifies, StoreError where it cannot be marked.
    """
    checkpoint = newest(store).checkpoint
    assert checkpoint is not None, "asked for a store that has some"
    disk = LocalDisk()
    try:
        (checkpoint.path / KEPT).touch()
        disk.sync_directory(checkpoint.path)
    except OSError as error:
        raise StoreError(f"{checkpoint.path}: cannot be marked as kept ({error.strerror}); use a new store") from None
    return checkpoint
