"""Checkpoints from the disk to the bucket: the files, each block compared with the manifest, then the manifest.

What is uploaded is the newest, and before it what is marked as retained for good; what newer ones overtook is not.
In the bucket the highest serial is the newest: nothing is put there that is older than what it has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from checkflow.errors import CorruptStoreError, StoreError
from checkflow.jsonfile import render
from checkflow.store.both.lock import LOCK
from checkflow.store.both.messages import UploadedReport
from checkflow.store.bucket.folder import is_a_store
from checkflow.store.bucket.names import (
    ATTEMPTS,
    UPLOADS,
    BucketContents,
    age,
    attempt_object,
    content_of,
    read_manifest,
    serial_of,
    uploaded_as,
)
from checkflow.store.bucket.objects import WRITTEN, BucketError, Objects
from checkflow.store.format.manifest import BLOCK_BYTES, KEPT, MANIFEST, FileEntry, Manifest
from checkflow.store.format.ranks import WHOLE
from checkflow.store.format.reader import Checkpoint, checkpoint_names, examine, is_gone
from checkflow.store.format.regular_file import open_regular, read_at
from checkflow.store.format.retention import Retained, Retention, to_prune
from checkflow.text import plain

_LATE_S = (0.5, 2.0)  # pauses, where a bucket lists late what it has


class OvertakenError(Exception):
    """Another run uploads to this bucket since."""


class StoreThereError(Exception):
    """What is uploaded to is, or has become, a store: whoever has that removes there what it has no use for."""


class OlderError(Exception):
    """What is on disk is older than what the bucket has."""


class Uploads:
    """Of one run, which is one attempt: begun with its first upload. `where`: this run, for messages of another;
    `before`: serial of the newest that its store had before it; None for a rank, whose parts have their age in their
    records; `whole`: of a rank, the bucket of all."""

    def __init__(
        self,
        objects: Objects,
        retention: Retention,
        where: Path,
        before: int | None = 0,
        whole: Objects | None = None,
    ) -> None:
        self._objects = objects
        self._whole = whole
        self._retention = retention
        self._where = where
        self._before = before
        self._attempt = 0  # until it is begun
        self._number = 0  # of the last upload that was begun
        self._last_serial = 0  # on disk, of the last one that the bucket has
        self._unreadable: set[str] = set()
        self._there: dict[str, int] = {}  # contents that the bucket had when it was looked at, and their serials
        self._newest_there: Manifest | None = None  # of these
        self._newest_serial = 0  # in the bucket, of what is newest on disk as well
        self._uploaded: dict[int, int] = {}  # serials on disk -> in the bucket
        self._left: list[str] = []  # names under which a try that failed put something
        self._known: dict[str, Retained] = {}  # checkpoints in the bucket whose manifest was read

    def due(self, store: Path) -> Checkpoint | None:
        """What is to be uploaded next, if anything. Raises OSError where the disk cannot be read now."""
        found = self._sound(store, self._last_serial)
        return next((each for each in reversed(found) if each.kept or each is found[0]), None)

    def found(self, store: Path, serial: int) -> Checkpoint | None:
        """That one, if the disk has it. Raises OSError."""
        return next((each for each in self._sound(store, serial - 1) if each.serial == serial), None)

    def left(self, store: Path, after: int, newest: int) -> Checkpoint | None:
        """Of so many of the newest, with a serial above that one, the latest iteration that was not uploaded: each may
        be what the other ranks have. Raises OSError."""
        left = (each for each in self._sound(store, after)[:newest] if each.serial not in self._uploaded)
        return max(left, key=lambda each: (each.iteration, each.serial), default=None)

    def _sound(self, store: Path, after: int) -> list[Checkpoint]:
        """On disk with a serial above that one, as far as they can be read; newest first. Raises OSError."""
        try:
            names = checkpoint_names(store)
        except StoreError:  # it is gone, which its saver tells
            return []
        new = [name for name in names if serial_of(name) > after and name not in self._unreadable]
        return [each for name in new if isinstance(each := examine(store, name), Checkpoint)]

    def drop(self, serial: int) -> None:
        """Remove an upload of this process, by its serial on disk. Raises BucketError."""
        there = self._uploaded.get(serial, 0)
        if there // UPLOADS != self._attempt:  # the bucket had it before: it may be whole
            return
        contents = self._look()
        for name, files in contents.checkpoints.items():
            if serial_of(name) == there:
                self._remove(name, files)
        if self._newest_serial == there:
            self._newest_serial = 0

    def upload(self, checkpoint: Checkpoint, *, to_cache: bool) -> UploadedReport:
        """`to_cache`: leave it in the page cache.

        Raises BucketError, to be tried again; CorruptStoreError for what is not as it was written, which is not due
        again; OlderError for what is not due again either; FileNotFoundError where it was pruned; OvertakenError;
        StoreThereError.
        """
        started = time.monotonic_ns()
        with contextlib.ExitStack() as opened:
            files = [
                (entry, opened.enter_context(self._open(checkpoint, entry)))  # readable, though it be pruned now
                for entry in checkpoint.manifest.files
            ]
            is_kept = checkpoint.kept and not checkpoint.manifest.keep
            self._begin()
            size_bytes = 0
            there = self._there.get(content_of(checkpoint.manifest))
            if there is not None:
                self._newest_serial = there
            elif self._is_older(checkpoint):
                self._last_serial = max(self._last_serial, checkpoint.serial)
                raise OlderError
            else:
                try:
                    self._put(checkpoint, files, is_kept=is_kept, to_cache=to_cache)
                except CorruptStoreError:
                    self._unreadable.add(checkpoint.path.name)
                    raise
                size_bytes = checkpoint.manifest.size_bytes
        self._last_serial = max(self._last_serial, checkpoint.serial)
        self._uploaded[checkpoint.serial] = self._newest_serial
        return UploadedReport(
            iteration=checkpoint.iteration,
            serial=checkpoint.serial,
            size_bytes=size_bytes,
            upload_ns=time.monotonic_ns() - started,
        )

    def is_there(self) -> bool:
        """Whether the bucket still has what it was last said to have; where it has not, that is due again. Raises
        BucketError, to be asked again; OvertakenError, StoreThereError."""
        if not self._newest_serial:
            return True
        contents = self._look()
        if self._newest_serial in map(serial_of, contents.checkpoints):
            return True
        self._learn(contents)
        self._last_serial = self._newest_serial = 0
        self._uploaded.clear()
        return False

    def prune(self, serial: int | None = None) -> None:
        """Remove what retention does not hold now, and what nobody finished. Raises BucketError.

        `serial`: on disk, of an upload of this process: what is newer does not count yet. The newest one unless given.
        """
        newest_serial = self._newest_serial if serial is None else self._uploaded.get(serial)
        if newest_serial is None:  # a process that died since has uploaded it
            return
        contents = self._look()
        if serial is not None and not contents.was_whole:
            self._objects.put(WHOLE, iter([b""]), 0)
        for name in contents.newest_first:
            known = self._known.get(name) or self._retained(contents, name)
            self._known[name] = replace(known, keep=known.keep or contents.is_kept(name))  # as another run may mark it
        for name in self._known.keys() - contents.checkpoints.keys():
            del self._known[name]
        serials = set(to_prune(self._known.values(), newest_serial, self._retention))
        for name, files in contents.checkpoints.items():
            if serial_of(name) in serials:
                self._remove(name, files)
        for name, files in contents.unfinished.items():
            if serial_of(name) <= self._attempt * UPLOADS + self._number:
                self._remove_files(name, files)
        self._objects.remove([attempt_object(each) for each in contents.begun if each < self._attempt])

    def _open(self, checkpoint: Checkpoint, entry: FileEntry) -> BinaryIO:
        path = checkpoint.path / entry.name
        try:
            return os.fdopen(open_regular(path, os.O_RDONLY), "rb", buffering=0)
        except FileNotFoundError:
            if is_gone(checkpoint.path):  # else it would be due again at once, for ever
                raise
            self._unreadable.add(checkpoint.path.name)
            raise CorruptStoreError(f"{entry.name}: is missing") from None

    def _remove(self, name: str, files: Iterable[str]) -> None:
        self._objects.remove([f"{name}/{MANIFEST}"])  # first: what is half removed is no checkpoint
        self._remove_files(name, (file for file in files if file != MANIFEST))

    def _remove_files(self, name: str, files: Iterable[str]) -> None:
        self._objects.remove([f"{name}/{file}" for file in files])
        self._objects.remove_directory(name)

    def clear(self) -> None:
        """Remove what this run's tries that failed have left: where there is no room, they would take it all."""
        if not self._left:
            return
        with contextlib.suppress(BucketError):  # it goes with the next try, or once a checkpoint is there
            contents = self._look()
            for name in self._left:
                if name not in contents.checkpoints:  # its manifest may have arrived, and the answer not
                    self._remove_files(name, contents.unfinished.get(name, ()))
            self._left.clear()

    def _begin(self) -> None:
        """This run is the last one to upload here, until another one begins."""
        if self._attempt:
            return
        contents = self._contents()
        self._learn(contents)
        for objects in filter(None, (self._whole, self._objects)):  # before there is anything that a listing may lack
            objects.put(WRITTEN, iter([b""]), 0)
        host, store = plain(socket.gethostname()), plain(os.fspath(self._where))
        who = render({"host": host, "store": store, "run": secrets.token_hex(16)}).encode()
        attempt = contents.attempt + 1
        while attempt < ATTEMPTS and not self._put_mine(attempt_object(attempt), who):
            attempt += 1
        if attempt >= ATTEMPTS:
            raise BucketError(f"there is {attempt_object(contents.attempt)}, and no number is left; use another prefix")
        self._attempt = attempt

    def _learn(self, contents: BucketContents) -> None:
        """What is there now. Raises BucketError."""
        found: list[Manifest] = []
        for name in contents.newest_first:
            with contextlib.suppress(CorruptStoreError):
                found.append(manifest := read_manifest(self._objects, name, contents.checkpoints[name]))
                self._known[name] = _as_retained(manifest, contents, name)
        self._there = {content_of(manifest): manifest.serial for manifest in found}
        self._newest_there = next(iter(found), None)

    def _is_older(self, checkpoint: Checkpoint) -> bool:
        """Than the newest that was there: by its place on disk, or where the disk has that no more, by when it was
        written; but what this run has written is not older than what another one has."""
        if self._newest_there is None or self._before is None:
            return False
        content = content_of(self._newest_there)
        same = (each for each in self._sound(checkpoint.path.parent, 0) if content_of(each.manifest) == content)
        if (on_disk := next(same, None)) is not None:
            return checkpoint.serial < on_disk.serial
        return checkpoint.serial <= self._before and age(checkpoint.manifest) <= age(self._newest_there)

    def _put(
        self, checkpoint: Checkpoint, files: list[tuple[FileEntry, BinaryIO]], *, is_kept: bool, to_cache: bool
    ) -> None:
        self.clear()
        self._number += 1  # a name that was begun with is not used again
        name, manifest = uploaded_as(checkpoint.manifest, self._attempt, self._number)
        self._left.append(name)
        for entry, file in files:
            self._objects.put(f"{name}/{entry.name}", _verified(entry, file), entry.size_bytes)
            if not to_cache:  # it is for who trains
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_kept:
            self._objects.put(f"{name}/{KEPT}", iter([b""]), 0)
        for pause_s in (*_LATE_S, None):
            there = self._look().unfinished.get(name, {})
            lost = [entry.name for entry, _ in files if there.get(entry.name) != entry.size_bytes]
            if not lost:
                break
            if pause_s is None:
                raise BucketError(f"{name}/{lost[0]}: was accepted, and is not there whole")
            time.sleep(pause_s)
        if not self._put_mine(f"{name}/{MANIFEST}", manifest.render()):
            raise BucketError(f"{name}/{MANIFEST}: somebody else has put it")
        self._left.clear()
        self._known[name] = Retained(manifest.serial, manifest.iteration, checkpoint.kept)
        self._there[content_of(manifest)] = self._newest_serial = manifest.serial
        self._newest_there = manifest

    def _put_mine(self, name: str, data: bytes) -> bool:
        """Whether it is there as this run put it: its own put may have arrived before an answer was lost."""
        return self._objects.put_new(name, data) or self._objects.read(name) == data

    def _look(self) -> BucketContents:
        contents = self._contents()
        if contents.attempt > self._attempt:
            raise OvertakenError(attempt_object(contents.attempt))
        return contents

    def _contents(self) -> BucketContents:
        sizes = self._objects.sizes()
        if self._objects.folder is not None and LOCK in sizes:
            raise StoreThereError(is_a_store(LOCK))
        return BucketContents.of(sizes)

    def _retained(self, contents: BucketContents, name: str) -> Retained:
        try:
            manifest = read_manifest(self._objects, name, contents.checkpoints[name])
        except CorruptStoreError:
            return Retained(serial_of(name), 0, keep=False, sound=False)
        return _as_retained(manifest, contents, name)


def _as_retained(manifest: Manifest, contents: BucketContents, name: str) -> Retained:
    return Retained(manifest.serial, manifest.iteration, manifest.keep or contents.is_kept(name))


def _verified(entry: FileEntry, file: BinaryIO) -> Iterator[bytes]:
    """The file's blocks, none before its hash matched. Raises CorruptStoreError."""
    for number in range(entry.block_count):
        size_bytes = min(BLOCK_BYTES, entry.size_bytes - number * BLOCK_BYTES)
        block = read_at(file.fileno(), number * BLOCK_BYTES, size_bytes)
        if xxhash.xxh3_128_hexdigest(block) != entry.block_hash(number):
            raise CorruptStoreError(f"{entry.name}: block {number} is not what was written")
        yield block
