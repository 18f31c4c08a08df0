"""A checkpoint that comes from elsewhere, verified block by block as it comes, made durable in a store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from checkflow.errors import CorruptStoreError
from checkflow.store.format.disk import LocalDisk, remove_tree
from checkflow.store.format.manifest import MANIFEST, FileEntry, Manifest, directory_name, parse_manifest
from checkflow.store.format.writer import ARRIVING, next_serial


def receive_checkpoint(store: Path, manifest: bytes, blocks: Iterator[bytes]) -> Path:
    """`blocks`: of 4 MiB, of each file that the manifest lists in turn. Its serial is the store's next.

    Returns its directory.
    Raises CorruptStoreError for what is not what the manifest says, OSError where it cannot be written.
    """
    parsed = parse_manifest(manifest)
    serial, disk = next_serial(store), LocalDisk()
    for left in sorted(store.glob(f"{ARRIVING}*")):
        remove_tree(disk, left)
    name = directory_name(serial, parsed.iteration)
    temporary = store / f"{ARRIVING}{name}-{os.getpid()}-{time.monotonic_ns()}"
    disk.make_directory(temporary)
    try:
        for entry in parsed.files:
            _write(temporary / entry.name, verified(entry, blocks))
        _write(temporary / MANIFEST, iter([_with_serial(parsed, serial)]))
        disk.sync_directory(temporary)
        disk.rename(temporary, store / name)
    except BaseException:
        remove_tree(disk, temporary)
        raise
    disk.sync_directory(store)
    return store / name


def _with_serial(manifest: Manifest, serial: int) -> bytes:
    return manifest.model_copy(update={"serial": serial}).render()


def is_block(entry: FileEntry, number: int, block: bytes) -> bool:
    """Whether it is what was written as the file's block of this number."""
    return xxhash.xxh3_128_hexdigest(block) == entry.block_hash(number)


def verified(entry: FileEntry, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks of a file, each once its hash was found to be right. Raises CorruptStoreError."""
    left_bytes = entry.size_bytes
    for number in range(entry.block_count):
        block = next(blocks)
        left_bytes -= len(block)
        if not is_block(entry, number, block):
            raise CorruptStoreError(f"{entry.name}: block {number} is not what was written")
        yield block
    if left_bytes:
        raise CorruptStoreError(f"{entry.name}: has other bytes than its manifest says")


def _write(path: Path, blocks: Iterator[bytes]) -> None:
    with path.open("xb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
