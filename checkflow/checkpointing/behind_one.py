"""The bucket behind the store of one process: what is newer there is downloaded before it is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from checkflow.checkpointing.behind import Behind
from checkflow.checkpointing.voices import Hearers
from checkflow.errors import CorruptStoreError, StoreError
from checkflow.store.both.config import BucketConfig
from checkflow.store.bucket.names import BucketContents, age, has_ranks, iteration_of, read_manifest, serial_of
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.manifest import Manifest
from checkflow.store.format.reader import checkpoint_names, sound_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle


class BehindOne(Behind):
    """See the module."""

    def __init__(self, objects: Objects, store: Path, hearers: Hearers, *, start_over: bool) -> None:
        """Ask it, and with `start_over` retain for good what is newest in it.

        Raises InputError where it refuses, StoreError where it is out and nobody can know what is to be resumed.
        """
        super().__init__(objects, store, hearers)
        sizes = self._asked(may_be_out=not start_over)
        if sizes is not None:
            contents = self._of_one(sizes)
            self.iterations = [iteration_of(name) for name in contents.newest_first]
            if start_over:
                self._keep_newest(contents)

    def start(self, handle: StoreHandle, retention: Retention, retry_s: float) -> None:
        """What is durable from now on is uploaded. Raises StoreError where no process can be started, InputError."""
        self._objects.make()
        before = max(map(serial_of, checkpoint_names(self._store)), default=0)
        self._process = handle.start_uploader(BucketConfig(self._store, self.url, retention, retry_s, before=before))

    def bring(self, iteration: int | None, than: Manifest | None) -> bool:
        """Download the newest checkpoint that verifies (of that iteration, if given) if it is newer than this one.

        Newer is what was written later. Returns whether there was one. Raises StoreError where it cannot be had, and
        CorruptStoreError where it is to be newer than nothing, and none that there is verifies.
        """
        wrong: list[str] = []
        sizes = self._asked(may_be_out=True)
        if sizes is None:
            return False
        contents = self._of_one(sizes)
        for name in contents.newest_first:
            if iteration not in (None, iteration_of(name)):
                continue
            try:
                manifest = read_manifest(self._objects, name, contents.checkpoints[name])
                if than is not None and age(manifest) <= age(than):
                    return False
                self._brought.clear()
                self._bring(self._objects, name, contents, self._store)
            except CorruptStoreError as error:
                wrong.append(f"{name}: {error}")
                self._hearers.notify(f"{self.url}: skipped {wrong[-1]}")
            except BucketError as error:
                raise self._unread(self._objects, name, error) from None
            else:
                return True
        if wrong and than is None:
            raise CorruptStoreError(
                f"{self.url}: no checkpoint verifies ({'; '.join(wrong[:3])}), and {self._store} has none; "
                "restore either from a copy, or attach(..., start_over=True) to begin anew"
            )
        return False

    def newest_here(self, iteration: int | None) -> Manifest | None:
        """Of the checkpoints on disk whose manifest is sound."""
        found = (each.manifest for each in sound_checkpoints(self._store))
        return next((each for each in found if iteration in (None, each.iteration)), None)

    def _of_one(self, sizes: Mapping[str, int]) -> BucketContents:
        """Raises StoreError for what several processes left, which was not to be seen when it was asked for that."""
        if has_ranks(sizes):
            raise StoreError(f"bucket: {self.url} has checkpoints of several processes, and did not say so; try again")
        return BucketContents.of(sizes)

    def _keep_newest(self, contents: BucketContents) -> None:
        for name in contents.newest_first:
            with contextlib.suppress(CorruptStoreError):  # an older one is kept
                self._keep(self._objects, name, contents)
                return
