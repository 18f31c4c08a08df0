"""Checking a whole store, and removing what does not verify."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from checkflow.errors import CorruptStoreError, StoreError
from checkflow.store.both.leftovers import leftovers
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.reader import (
    Checkpoint,
    SkippedCheckpoint,
    is_gone,
    list_checkpoints,
    nothing_is_scarce,
    verify,
)
from checkflow.store.format.writer import ARRIVING, INCOMPLETE, PRUNED, remove_checkpoint


@dataclass(frozen=True, slots=True)
class Checked:
    """A store's checkpoints, newest first, told apart; `leftovers` are what a killed saver did not finish.

    `failed`: what could not be removed, and why.
    """

    verified: tuple[Checkpoint, ...]
    wrong: tuple[SkippedCheckpoint, ...]
    leftovers: tuple[Path, ...]
    failed: tuple[str, ...] = ()


def check_store(store: Path, progress: Callable[[str], None] = lambda _: None) -> Checked:
    """Read every byte of every checkpoint. Raises StoreError for a path that is no store."""
    verified: list[Checkpoint] = []
    wrong: list[SkippedCheckpoint] = []
    for found in list_checkpoints(store):
        progress(f"reading {found.path.name}")
        if isinstance(found, SkippedCheckpoint):
            wrong.append(found)
            continue
        try:
            with nothing_is_scarce(store):
                verify(found)
            verified.append(found)
        except CorruptStoreError as error:
            if not is_gone(found.path):  # else a running trainer pruned it
                wrong.append(SkippedCheckpoint(found.path, found.serial, found.iteration, str(error)))
    return Checked(tuple(verified), tuple(wrong), tuple(leftovers(store, (ARRIVING, INCOMPLETE, PRUNED))))


def repair_store(store: Path, notify: Callable[[str], None], progress: Callable[[str], None]) -> Checked:
    """Check a store that nobody writes to, then remove what does not verify, each told to `notify` before.

    Returns what was found, and what of it could not be removed. Raises StoreBusyError while a trainer has the store (a
    saver is waited for), and CorruptStoreError if nothing verifies: a person may still save something from it.
    """
    check_store_is_there(store)
    lock = StoreLock.acquire(store, notify)
    try:
        checked = check_store(store, progress)
        if checked.wrong and not checked.verified:
            raise CorruptStoreError(
                f"{store}: no checkpoint verifies ({checked.wrong[0]}), so nothing is removed; restore the store "
                "from a copy, or remove it yourself"
            )
        failed: list[str] = []
        for path, why in [
            *((wrong.path, wrong.reason) for wrong in checked.wrong),
            *((path, "left by a saver that was killed") for path in checked.leftovers),
        ]:
            notify(f"removing {path.name}: {why}")
            try:
                _remove(store, path)
            except OSError as error:  # the others can go
                failed.append(f"{error.filename or path}: {error.strerror or error}")
        return replace(checked, failed=tuple(failed))
    finally:
        lock.close()


def check_store_is_there(store: Path) -> None:
    """Raises StoreError unless the path is a directory."""
    if not os.path.isdir(store):  # noqa: PTH112 (never raises)
        raise StoreError(f"{store}: is no store; give the directory that was passed to attach")


def _remove(store: Path, path: Path) -> None:
    disk = LocalDisk()
    if path.is_symlink() or not path.is_dir():
        disk.unlink(path)  # never follow a link out of the store
    else:
        remove_checkpoint(disk, path)
    disk.sync_directory(store)
