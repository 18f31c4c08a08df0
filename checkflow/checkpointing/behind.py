"""The bucket behind a training's store: asked at attach, uploaded to by a process, downloaded from in restore()."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from checkflow.checkpointing.sink import POLL_S
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.store.both.config import BucketConfig
from checkflow.store.bucket.download import download
from checkflow.store.bucket.names import BucketContents, iteration_of, read_manifest
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.disk import LocalDisk, remove_tree
from checkflow.store.format.manifest import KEPT, Manifest
from checkflow.store.format.reader import Checkpoint, checkpoint_names, list_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.format.writer import PRUNED
from checkflow.store.trainer.bucket_process import BucketProcess
from checkflow.store.trainer.handle import StoreHandle
from checkflow.units import format_bytes


class Behind:
    """See the module. `iterations`: of the checkpoints at `url` when it was asked at attach, newest first."""

    def __init__(
        self,
        objects: Objects,
        handle: StoreHandle,
        *,
        start_over: bool,
        notify: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """Ask it, and with `start_over` retain for good what is newest in it.

        Raises InputError where it refuses, StoreError where it is out and nobody can know what is to be resumed.
        """
        self.url = objects.url
        self._objects = objects
        self._store = handle.path
        self._notify = notify
        self._tell = tell
        self._process: BucketProcess | None = None
        self._next_poll_s = 0.0  # time.monotonic
        self._brought: Path | None = None
        contents = self._asked(may_be_out=not start_over)
        names = [] if contents is None else contents.newest_first
        self.iterations = [iteration_of(name) for name in names]
        if start_over and contents is not None:
            self._keep_newest(contents)

    def start(self, handle: StoreHandle, retention: Retention, retry_s: float) -> None:
        """What is durable from now on is uploaded. Raises StoreError where no process can be started."""
        self._process = handle.start_uploader(BucketConfig(self._store, self.url, retention, retry_s))

    def poll(self) -> None:
        """Tell what the uploader has said, once a second. Never waits."""
        if self._process is not None and time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + POLL_S
            self._process.poll()

    def wait_for(self, iteration: int | None, deadline: float) -> bool:
        """Whether the bucket has it by then (of time.monotonic)."""
        return self._process is not None and self._process.wait_for(iteration, deadline)

    def close(self, deadline_s: float) -> None:
        """Wait so long until the bucket has what is newest on disk; the uploader then goes on by itself."""
        if self._process is not None:
            self._process.close(deadline_s)

    def bring(self, iteration: int | None, than: Manifest | None) -> bool:
        """Download the newest checkpoint that verifies (of that iteration, if given) if it is newer than this one.

        Newer is what was written later. Returns whether there was one. Raises StoreError where it cannot be had, and
        CorruptStoreError where it is to be newer than nothing, and none that there is verifies.
        """
        wrong: list[str] = []
        contents = self._asked(may_be_out=True)
        if contents is None:
            return False
        for name in contents.newest_first:
            sizes = contents.checkpoints[name]
            if iteration not in (None, iteration_of(name)):
                continue
            try:
                manifest = read_manifest(self._objects, name, sizes)
                if than is not None and _age(manifest) <= _age(than):
                    return False
                self._tell(f"{self._store}: downloading {name} from {self.url}, {_size(manifest)}")
                self._brought = download(self._objects, name, sizes, self._store)
            except CorruptStoreError as error:
                wrong.append(f"{name}: {error}")
                self._notify(f"{self.url}: skipped {wrong[-1]}")
            except BucketError as error:
                raise StoreError(
                    f"{self.url}: {name} is newer than what {self._store} has, and cannot be read ({error}); "
                    "try again, or attach without bucket= to go on from the disk"
                ) from None
            except OSError as error:
                raise StoreError(
                    f"{self._store}: {name} cannot be written ({error.strerror}); free space, or choose another store"
                ) from None
            else:
                return True
        if wrong and than is None:
            raise CorruptStoreError(
                f"{self.url}: no checkpoint verifies ({'; '.join(wrong[:3])}), and {self._store} has none; "
                "restore either from a copy, or attach(..., start_over=True) to begin anew"
            )
        return False

    def take_back(self) -> None:
        """What was downloaded last is of another training: the disk is as if it had not been. Never raises."""
        if self._brought is None:
            return
        disk, hidden = LocalDisk(), self._brought.with_name(PRUNED + self._brought.name)
        with contextlib.suppress(OSError):
            disk.rename(self._brought, hidden)
            disk.sync_directory(self._store)
            remove_tree(disk, hidden)
        self._brought = None

    def newest_here(self, iteration: int | None) -> Manifest | None:
        """Of the checkpoints on disk whose manifest is sound."""
        found = (each.manifest for each in list_checkpoints(self._store) if isinstance(each, Checkpoint))
        return next((each for each in found if iteration in (None, each.iteration)), None)

    def _asked(self, *, may_be_out: bool) -> BucketContents | None:
        """None where it is out and the disk has something to go on from, which is told."""
        try:
            return BucketContents.of(self._objects.sizes())
        except BucketError as error:
            if error.is_refused:
                raise InputError(
                    f"bucket: {self.url}: {error}; check its name, and the credentials in the environment"
                ) from None
            if not (may_be_out and checkpoint_names(self._store)):
                raise StoreError(
                    f"bucket: {self.url} cannot be reached ({error}), so it is not known whether it has a "
                    "checkpoint; try again, or attach without bucket="
                ) from None
            self._notify(
                f"{self.url}: cannot be reached ({error}); what is on disk is taken for the newest, and is "
                "uploaded once the bucket answers"
            )
            return None

    def _keep_newest(self, contents: BucketContents) -> None:
        for name in contents.newest_first:
            try:
                if not read_manifest(self._objects, name, contents.checkpoints[name]).keep:
                    self._objects.put(f"{name}/{KEPT}", iter([b""]), 0)
            except CorruptStoreError:  # an older one is kept
                continue
            except BucketError as error:
                raise StoreError(f"{self.url}: {name} cannot be kept ({error}); try again") from None
            self._tell(f"{self.url}: starts over; {name} is retained for good")
            return


def _age(manifest: Manifest) -> tuple[str, int]:
    """When it was written, by the clock of the machine that wrote it: in UTC to the second, so text compares."""
    return manifest.created, manifest.iteration


def _size(manifest: Manifest) -> str:
    return format_bytes(manifest.size_bytes)
