"""A checkpoint from the bucket to the disk, each block verified as it comes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from checkflow.errors import CorruptStoreError
from checkflow.store.bucket.names import read_manifest
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.manifest import RECORD, FileEntry, Manifest
from checkflow.store.format.received import is_block, receive_checkpoint, verified


def read_record(objects: Objects, name: str, manifest: Manifest) -> bytes:
    """The commit record of the checkpoint of this name. Raises CorruptStoreError, BucketError."""
    entry = manifest.entry(RECORD)
    with _whole():
        return b"".join(verified(entry, _blocks_of(objects, f"{name}/{RECORD}", entry)))


def download(objects: Objects, name: str, sizes: Mapping[str, int], store: Path) -> Path:
    """The checkpoint of this name, whose objects have these sizes, is the store's newest then. Returns its directory.

    Raises CorruptStoreError for what is not what was written, BucketError where it cannot be read, OSError where it
    cannot be written.
    """
    manifest = read_manifest(objects, name, sizes)
    with _whole():
        return receive_checkpoint(store, manifest.render(), _blocks(objects, name, manifest))


def compare(objects: Objects, name: str, sizes: Mapping[str, int]) -> None:
    """Read every byte of the checkpoint of this name. Raises CorruptStoreError, BucketError."""
    manifest = read_manifest(objects, name, sizes)
    blocks = _blocks(objects, name, manifest)
    with _whole():
        for entry in manifest.files:
            deque(verified(entry, blocks), maxlen=0)


def _blocks(objects: Objects, name: str, manifest: Manifest) -> Iterator[bytes]:
    """Of each of its files in turn."""
    for entry in manifest.files:
        yield from _blocks_of(objects, f"{name}/{entry.name}", entry)


def _blocks_of(objects: Objects, path: str, entry: FileEntry) -> Iterator[bytes]:
    """Of one. What is not what was written is read once more: it may only have come so."""
    for number, block in enumerate(objects.blocks(path, entry.size_bytes)):
        yield block if is_block(entry, number, block) else objects.block(path, number, entry.size_bytes)


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """An object that is missing since the bucket was looked at is as one that is not what was written."""
    try:
        yield
    except BucketError as error:
        if error.is_missing:
            raise CorruptStoreError(f"an object is missing ({error})") from None
        raise
