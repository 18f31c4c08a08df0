"""The highest serial in a bucket is of what was newest, whatever is uploaded again, marked, lost or on an old disk."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_store import InProcess

from checkflow.store.bucket.names import BucketContents, iteration_of, serial_of
from checkflow.store.bucket.objects import Objects
from checkflow.store.bucket.upload import OlderError, OvertakenError, Uploads
from checkflow.store.format.reader import checkpoint_names
from checkflow.store.format.retention import Retention


class Disk:
    """A store, and whoever uploads from it; `old` is a copy of it as it was once."""

    def __init__(self, folder: Path, retention: Retention) -> None:
        self.store = folder / "store"
        self.saver = InProcess(self.store, retention=retention)
        self.objects = Objects.open(f"file://{folder}/bucket")
        self.old = folder / "old"
        self.completed = 0
        self._retention = retention
        self.start()

    def start(self, store: Path | None = None) -> None:
        """Another run."""
        self.of = store or self.store
        found = max(map(serial_of, checkpoint_names(self.of)), default=0)
        self.uploads = Uploads(self.objects, self._retention, self.of, found)

    def train(self, *, keep: bool) -> None:
        self.completed += 1
        self.saver.persist(self.completed, keep=keep)

    def upload(self) -> bool:
        """What is due. Whether anything was."""
        due = self.uploads.due(self.of)
        if due is None:
            return False
        try:
            self.uploads.upload(due, to_cache=True)
        except OlderError:
            return True
        self.uploads.prune()
        return True

    def rest(self) -> None:
        while self.upload() or not self.uploads.is_there():
            pass

    def names(self) -> list[str]:
        return BucketContents.of(self.objects.sizes()).newest_first

    def lose_newest(self) -> None:
        name = self.names()[0]
        self.objects.remove([path for path in self.objects.sizes() if path.startswith(f"{name}/")])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path, Retention(last=2))
    yield found
    found.saver.close()


def test_what_is_retained_for_good_is_uploaded_once(disk: Disk) -> None:
    """Another run finds it on disk, and older than what the bucket has."""
    for iteration in range(1, 7):
        disk.train(keep=iteration < 5)
        disk.rest()
    names = disk.names()
    assert sorted(map(iteration_of, names)) == [1, 2, 3, 4, 5, 6]
    disk.start()
    disk.rest()
    assert disk.names() == names


def test_what_was_retained_and_has_gone_from_the_bucket_is_not_put_above_newer_ones(disk: Disk) -> None:
    disk.train(keep=True)
    disk.rest()
    disk.lose_newest()
    for _ in range(3):
        disk.train(keep=False)
        disk.rest()
    names = disk.names()
    disk.start()
    disk.rest()
    assert disk.names() == names and iteration_of(names[0]) == 4


def test_an_old_disk_takes_nothing_s_place(disk: Disk) -> None:
    """Of a machine that trained before another one did, whose checkpoints the first has not downloaded yet."""
    disk.train(keep=True)
    disk.train(keep=False)
    shutil.copytree(disk.store, disk.old)
    for _ in range(3):
        disk.train(keep=False)
        disk.rest()
    names = disk.names()
    disk.start(disk.old)
    disk.rest()
    assert disk.names() == names and iteration_of(names[0]) == 5


def test_what_a_run_writes_is_uploaded_though_a_clock_says_that_it_is_older(disk: Disk, tmp_path: Path) -> None:
    """Of two machines: what the other one has put was written a hundred years later."""
    other = InProcess(tmp_path / "other")
    other.persist(7)
    found = Uploads(disk.objects, Retention(), tmp_path / "other")
    due = found.due(tmp_path / "other")
    assert due is not None
    later = due.manifest.model_copy(update={"created": "2126-01-01T00:00:00+00:00"})
    (due.path / "manifest.json").write_bytes(later.render())
    due = found.due(tmp_path / "other")
    assert due is not None
    found.upload(due, to_cache=True)
    other.close()
    disk.train(keep=False)
    disk.start()
    disk.rest()
    assert [iteration_of(name) for name in disk.names()] == [7]
    disk.train(keep=False)
    disk.rest()
    assert [iteration_of(name) for name in disk.names()] == [2, 7]


def test_who_says_that_it_is_there_has_looked(disk: Disk) -> None:
    disk.train(keep=False)
    disk.rest()
    disk.lose_newest()
    assert not disk.names()
    disk.rest()
    assert [iteration_of(name) for name in disk.names()] == [1]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_newest_that_was_uploaded_is_the_first(seed: int, disk: Disk) -> None:
    """Runs that train, mark, die between two uploads, begin again, and begin on an old disk."""
    draw = random.Random(seed)
    newest = 0
    for _ in range(40):
        act = draw.choice(("train", "train", "keep", "upload", "rest", "start", "old", "copy"))
        if act in ("train", "keep"):
            if disk.of != disk.store:  # it is resumed from there, after what is newer was downloaded
                disk.start()
            disk.train(keep=act == "keep")
        elif act == "copy":
            shutil.rmtree(disk.old, ignore_errors=True)
            shutil.copytree(disk.store, disk.old)
        elif act == "old" and disk.old.is_dir():
            disk.start(disk.old)
        elif act == "start":
            disk.start()
        else:
            try:
                disk.upload() if act == "upload" else disk.rest()
            except OvertakenError:
                disk.start()
        found = [iteration_of(name) for name in disk.names()]
        assert not found or found[0] == max(found) >= newest
        newest = max(found, default=newest)
        assert len(found) == len(set(found))
