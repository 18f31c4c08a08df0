"""The bucket behind a training's store: asked at attach, and uploaded to by a process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from checkflow.checkpointing.sink import POLL_S
from checkflow.checkpointing.voices import Hearers
from checkflow.errors import InputError, StoreError, remedy
from checkflow.store.bucket.download import download
from checkflow.store.bucket.folder import check_apart
from checkflow.store.bucket.names import BucketContents, read_manifest
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.manifest import KEPT
from checkflow.store.format.reader import checkpoint_names
from checkflow.store.format.writer import remove_checkpoint
from checkflow.store.trainer.bucket_process import BucketProcess
from checkflow.units import format_bytes


def bucket_behind(store: Path, url: str | None) -> Objects | None:
    """The bucket of this URL, if one is given, behind this store, an absolute path. Raises InputError."""
    if url is None:
        return None
    objects = Objects.open(url)
    if objects.folder is not None:
        check_apart(url, objects.folder, store)
    return objects


class Behind:
    """Of one process, or of one rank of several.

    `iterations`: of the checkpoints at `url` when it was asked at attach, newest first.
    """

    def __init__(self, objects: Objects, store: Path, hearers: Hearers) -> None:
        self.url = objects.url
        self.iterations: list[int] = []
        self._objects = objects
        self._store = store
        self._hearers = hearers
        self._process: BucketProcess | None = None
        self._next_poll_s = 0.0  # time.monotonic
        self._brought: list[Path] = []

    def poll(self) -> None:
        """Tell what the uploader has said, once a second. Never waits."""
        if self._process is not None and time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + POLL_S
            self._process.poll()

    def wait(self, deadline: float) -> bool:
        """Whether the bucket has what is newest on disk by then (of time.monotonic)."""
        return self._process is not None and self._process.wait(deadline)

    def close(self, deadline_s: float) -> None:
        """Wait so long until the bucket has what is newest on disk; the uploader then goes on by itself."""
        if self._process is not None:
            self._process.close(deadline_s)

    def take_back(self) -> None:
        """What was downloaded last is of another training: the disk is as if it had not been. Never raises."""
        while self._brought:
            with contextlib.suppress(OSError):
                remove_checkpoint(LocalDisk(), self._brought.pop())

    def _bring(self, objects: Objects, name: str, contents: BucketContents, store: Path) -> None:
        """The checkpoint of this name, into this store. Raises CorruptStoreError for one that is not whole, StoreError
        where it cannot be had now."""
        sizes = contents.checkpoints[name]
        try:
            self._hearers.tell(f"{store}: downloading {name} from {objects.url}, {format_bytes(sum(sizes.values()))}")
            self._brought.append(download(objects, name, sizes, store))
        except BucketError as error:
            raise self._unread(objects, name, error) from None
        except OSError as error:
            raise StoreError(
                f"{store}: {name} cannot be written ({error.strerror}); {remedy(error, 'check the disk')}, "
                "or choose another store"
            ) from None

    def _unread(self, objects: Objects, name: str, error: BucketError) -> StoreError:
        return StoreError(
            f"{objects.url}: {name} is what {self._store} lacks, and cannot be read ({error}); "
            "try again, or attach without bucket= to go on from the disk"
        )

    def _keep(self, objects: Objects, name: str, contents: BucketContents) -> None:
        """Retain it for good. Raises CorruptStoreError for one that is not whole, StoreError."""
        try:
            if not read_manifest(objects, name, contents.checkpoints[name]).keep:
                objects.put(f"{name}/{KEPT}", iter([b""]), 0)
        except BucketError as error:
            raise StoreError(f"{objects.url}: {name} cannot be kept ({error}); try again") from None
        self._hearers.tell(f"{objects.url}: starts over; {name} is retained for good")

    def _asked(self, *, may_be_out: bool) -> Mapping[str, int] | None:
        """The sizes of its objects; None where it is out and the disk has something to go on from, which is told.

        Raises InputError where it refuses, StoreError where it is out and nobody can know what is to be resumed.
        """
        try:
            return self._objects.sizes()
        except BucketError as error:
            if error.is_refused:
                raise InputError(f"bucket: {self.url}: {error}; {self._objects.remedy(error)}") from None
            if not (may_be_out and checkpoint_names(self._store)):
                raise StoreError(
                    f"bucket: {self.url} cannot be reached ({error}), so it is not known whether it has a "
                    "checkpoint; try again, or attach without bucket="
                ) from None
            self._hearers.notify(
                f"{self.url}: cannot be reached ({error}); what is on disk is taken for the newest, and is "
                "uploaded once the bucket answers"
            )
            return None
