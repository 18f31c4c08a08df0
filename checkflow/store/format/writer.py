"""One staged checkpoint to one durable directory, in the order that a power cut at any moment survives.

Files and the manifest; each file synced, then the manifest, then the directory; its name; the store, synced. What the
checkpoint before has already, of a lane that was not staged since, gets a second name instead of being written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import xxhash

from checkflow.errors import StoreError
from checkflow.lanes import lane_file
from checkflow.store.format.disk import Disk, NewFiles, remove_tree
from checkflow.store.format.layout import Layout
from checkflow.store.format.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    MAX_CREATED,
    MAX_SERIAL,
    RECORD,
    FileEntry,
    Manifest,
    directory_name,
    parse_directory_name,
)
from checkflow.store.format.pieces import pieces
from checkflow.store.format.reader import sound_checkpoints

INCOMPLETE, PRUNED = ".incomplete-", ".pruned-"  # what a crash may leave; the next saver removes it
ARRIVING = ".arriving-"  # the same of a restore that got it from elsewhere; the next such restore removes it


@dataclass(frozen=True, slots=True)
class StagedSlot:
    """A slot's bytes, how they lie there, and which staging they are of: the same number, the same bytes."""

    data: memoryview
    layout: Layout
    sequence: int


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """What to write: the slot of each lane, and what was staged with the last one."""

    slots: tuple[StagedSlot, ...]
    iteration: int
    record: bytes
    keep: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A durable checkpoint."""

    manifest: Manifest
    files: dict[tuple[int, str], FileEntry]  # of tensors, by the sequence that they were staged with
    written_bytes: int  # what is not of the checkpoint before

    @property
    def name(self) -> str:
        """Its directory's."""
        return directory_name(self.manifest.serial, self.manifest.iteration)


def next_serial(store: Path) -> int:
    """One more than the highest serial that any directory in the store has. Raises OSError."""
    names = (parse_directory_name(path.name) for path in store.iterdir())
    highest = max((name for name in names if name is not None), key=lambda name: name.serial, default=None)
    if highest is not None and highest.serial >= MAX_SERIAL:
        name = directory_name(highest.serial, highest.iteration)
        raise OSError(errno.EOVERFLOW, "no checkpoint can come after it, remove or rename it", name)
    return 1 if highest is None else highest.serial + 1


def created(after: str) -> str:
    """Now, as a manifest has it: in UTC, to the second. Where the clock was set back, a second after `after`: of what
    is on disk and in a bucket the later one is restored."""
    now = datetime.now(UTC)
    if after and (before := datetime.fromisoformat(after)) > now:
        now = before + timedelta(seconds=1)
    return min(now, MAX_CREATED).isoformat(timespec="seconds")


def newest_created(store: Path) -> str:
    """When the newest checkpoint was whose manifest can be read, and is sound; "" where none is."""
    with contextlib.suppress(StoreError):
        return next((each.manifest.created for each in sound_checkpoints(store)), "")
    return ""


def write_checkpoint(
    disk: Disk, store: Path, serial: int, staged: StagedCheckpoint, versions: dict[str, str],
    progress: Callable[[], None], before: Published | None = None, after: str = "",
) -> Published:  # fmt: skip
    """Write and publish a checkpoint, and return it once it is durable. Raises OSError.

    `before`: one whose files may get a second name here. `after`: when the one before it was `created`. After an error
    the new directory may be left under a name that no reader takes for a checkpoint.
    """
    temporary = store / f"{INCOMPLETE}{directory_name(serial, staged.iteration)}-{os.getpid()}-{time.monotonic_ns()}"
    disk.make_directory(temporary)
    found: dict[tuple[int, str], FileEntry] = {}
    written_bytes = len(staged.record)
    with NewFiles(disk, progress) as files:
        for lane, slot in enumerate(staged.slots):
            for file in slot.layout.files:
                name = file.name if len(staged.slots) == 1 else lane_file(lane, file.name)
                key = slot.sequence, name
                if before is not None and key in before.files and _linked(disk, store / before.name, temporary, name):
                    found[key] = before.files[key]
                    continue
                blocks = files.write(temporary / name, pieces(slot.data, file), file.size_bytes, hash_blocks)
                found[key] = FileEntry(name=name, size_bytes=file.size_bytes, blocks=blocks)
                written_bytes += file.size_bytes
        blocks = files.write(temporary / RECORD, [memoryview(staged.record)], len(staged.record), hash_blocks)
        record = FileEntry(name=RECORD, size_bytes=len(staged.record), blocks=blocks)
        manifest = Manifest(
            serial=serial,
            iteration=staged.iteration,
            keep=staged.keep,
            created=created(after),
            versions=versions,
            files=(*found.values(), record),
        )
        text = manifest.render()
        files.write(temporary / MANIFEST, [memoryview(text)], len(text))
        files.sync()
    name_for_good(disk, temporary, store / directory_name(serial, staged.iteration))
    progress()
    return Published(manifest, found, written_bytes)


def name_for_good(disk: Disk, temporary: Path, final: Path) -> None:
    """Give a directory, all files of which are synced, the name of a checkpoint. Raises OSError, also where one has it.

    Durable once this returns; after an error it has its temporary name again, where that can be had.
    """
    disk.sync_directory(temporary)
    disk.rename(temporary, final)
    try:
        disk.sync_directory(final.parent)
    except OSError:
        with contextlib.suppress(OSError):
            disk.rename(final, temporary)  # else each try would leave a whole one
        raise


def _linked(disk: Disk, source: Path, target: Path, name: str) -> bool:
    """Whether a file of another checkpoint got a second name; what cannot have one is written."""
    try:
        disk.link(source / name, target / name)
    except OSError:
        return False
    return True


def hash_blocks(data: memoryview) -> str:
    """The xxh3-128 of each 4 MiB, as hexadecimal digits one after the other."""
    return "".join(
        xxhash.xxh3_128_hexdigest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)
    )


def remove_checkpoint(disk: Disk, path: Path) -> None:
    """No checkpoint any more at once, also after a crash; then its bytes go. Raises OSError."""
    if not path.name.startswith(PRUNED):
        hidden = path.with_name(PRUNED + path.name)
        disk.rename(path, hidden)
        disk.sync_directory(path.parent)
        path = hidden
    remove_tree(disk, path)
