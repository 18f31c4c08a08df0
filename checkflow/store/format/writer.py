"""One staged checkpoint to one durable directory, in the order that a power cut at any moment survives.

Files and the manifest; each file synced, then the manifest, then the directory; its name; the store, synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from checkflow.lanes import lane_file
from checkflow.store.format.disk import Disk, NewFiles
from checkflow.store.format.layout import Layout
from checkflow.store.format.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    MAX_SERIAL,
    RECORD,
    FileEntry,
    Manifest,
    directory_name,
    parse_directory_name,
)
from checkflow.store.format.pieces import pieces

INCOMPLETE, PRUNED = ".incomplete-", ".pruned-"  # what a crash may leave; the next saver removes it


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """What to write: slots' bytes, how they lie there, and what was staged with the last one."""

    slots: tuple[tuple[memoryview, Layout], ...]  # of each lane
    iteration: int
    record: bytes
    keep: bool


def next_serial(store: Path) -> int:
    """One more than the highest serial that any directory in the store has. Raises OSError."""
    names = (parse_directory_name(path.name) for path in store.iterdir())
    highest = max((name for name in names if name is not None), key=lambda name: name.serial, default=None)
    if highest is not None and highest.serial >= MAX_SERIAL:
        name = directory_name(highest.serial, highest.iteration)
        raise OSError(errno.EOVERFLOW, "no checkpoint can come after it, remove or rename it", name)
    return 1 if highest is None else highest.serial + 1


def write_checkpoint(
    disk: Disk, store: Path, serial: int, staged: StagedCheckpoint, versions: dict[str, str],
    progress: Callable[[], None],
) -> Manifest:  # fmt: skip
    """Write and publish a checkpoint, and return its manifest once it is durable. Raises OSError.

    After an error the new directory may be left under a name that no reader takes for a checkpoint.
    """
    temporary = store / f"{INCOMPLETE}{directory_name(serial, staged.iteration)}-{os.getpid()}-{time.monotonic_ns()}"
    disk.make_directory(temporary)
    entries: list[FileEntry] = []
    count = len(staged.slots)
    contents = [
        (file.name if count == 1 else lane_file(lane, file.name), file.size_bytes, pieces(slot, file))
        for lane, (slot, layout) in enumerate(staged.slots)
        for file in layout.files
    ]
    contents.append((RECORD, len(staged.record), iter([memoryview(staged.record)])))
    with NewFiles(disk, progress) as files:
        for name, size_bytes, parts in contents:
            blocks = files.write(temporary / name, parts, size_bytes, hash_blocks)
            entries.append(FileEntry(name=name, size_bytes=size_bytes, blocks=blocks))
        manifest = Manifest(
            serial=serial,
            iteration=staged.iteration,
            keep=staged.keep,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions,
            files=tuple(entries),
        )
        text = manifest.render()
        files.write(temporary / MANIFEST, [memoryview(text)], len(text))
        files.sync()
    disk.sync_directory(temporary)
    final = store / directory_name(serial, staged.iteration)
    disk.rename(temporary, final)
    try:
        disk.sync_directory(store)
    except OSError:
        with contextlib.suppress(OSError):
            disk.rename(final, temporary)  # else each try would leave a whole one
        raise
    progress()
    return manifest


def hash_blocks(data: memoryview) -> str:
    """The xxh3-128 of each 4 MiB, as hexadecimal digits one after the other."""
    return "".join(
        xxhash.xxh3_128_hexdigest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)
    )
