"""A checkpoint in two steps: its files first, its record and its name once those who share it have theirs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from checkflow.store.format.disk import Disk, NewFiles, remove_tree
from checkflow.store.format.manifest import MANIFEST, RECORD, FileEntry, Manifest, directory_name
from checkflow.store.format.writer import (
    INCOMPLETE,
    created,
    hash_blocks,
    name_for_good,
    newest_created,
    next_serial,
)


@dataclass(frozen=True, slots=True)
class NewFile:
    """What a file is to have; `pieces` as NewFiles.write takes them."""

    name: str
    size_bytes: int
    pieces: Iterable[memoryview]


@dataclass(frozen=True, slots=True)
class Begun:
    """Files that are on the device, in a directory that no reader takes for a checkpoint."""

    store: Path
    directory: Path
    files: tuple[FileEntry, ...]


def begin(disk: Disk, store: Path, files: Iterable[NewFile]) -> Begun:
    """Write and sync a checkpoint's files but its record. Raises OSError, and what asking for a piece raises."""
    directory = store / f"{INCOMPLETE}{os.getpid()}-{time.monotonic_ns()}"
    disk.make_directory(directory)
    entries: list[FileEntry] = []
    with _or_removed(disk, directory), NewFiles(disk) as new:
        for file in files:
            blocks = new.write(directory / file.name, file.pieces, file.size_bytes, hash_blocks)
            entries.append(FileEntry(name=file.name, size_bytes=file.size_bytes, blocks=blocks))
        new.sync()
    return Begun(store, directory, tuple(entries))


def publish(disk: Disk, begun: Begun, iteration: int, record: bytes, versions: dict[str, str]) -> Manifest:
    """Write its record and manifest, and give it the name of the store's next checkpoint. Durable once this returns.

    Raises OSError.
    """
    with _or_removed(disk, begun.directory):
        serial = next_serial(begun.store)
        with NewFiles(disk) as new:
            blocks = new.write(begun.directory / RECORD, [memoryview(record)], len(record), hash_blocks)
            manifest = Manifest(
                serial=serial,
                iteration=iteration,
                keep=False,
                created=created(newest_created(begun.store)),
                versions=versions,
                files=(*begun.files, FileEntry(name=RECORD, size_bytes=len(record), blocks=blocks)),
            )
            text = manifest.render()
            new.write(begun.directory / MANIFEST, [memoryview(text)], len(text))
            new.sync()
        name_for_good(disk, begun.directory, begun.store / directory_name(serial, iteration))
    return manifest


@contextlib.contextmanager
def _or_removed(disk: Disk, directory: Path) -> Iterator[None]:
    """What fails inside leaves nothing behind, as far as that can be removed."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(disk, directory)
        raise
