"""Retaining for good what was written without being marked so."""

from __future__ import annotations

from checkflow.errors import StoreError, remedy
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.manifest import KEPT
from checkflow.store.format.reader import Checkpoint


def keep(checkpoint: Checkpoint) -> None:
    """Have retention leave it alone, in this run and in later ones. Raises StoreError where it cannot be marked."""
    disk = LocalDisk()
    try:
        (checkpoint.path / KEPT).touch()
        disk.sync_directory(checkpoint.path)
    except OSError as error:
        raise StoreError(
            f"{checkpoint.path}: cannot be marked as kept ({error.strerror}); {remedy(error, 'use a new store')}"
        ) from None
