"""Every disk operation fails in turn: it is reported, the last good checkpoint stays good, the next one works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_store import SMALL, InProcess, newest_whole

from checkflow.store.both.messages import DurableReport, FailedReport, Notice, VerifiedReport
from checkflow.store.format.blocks import buffer_of
from checkflow.store.format.disk import Disk, LocalDisk, NewFiles
from checkflow.store.format.manifest import directory_name
from checkflow.store.format.reader import Checkpoint, SkippedCheckpoint, examine, list_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.format.writer import INCOMPLETE, PRUNED


@dataclass
class FailingDisk(LocalDisk):
    """Counts operations, and fails the one with number `fails` (from 1)."""

    fails: int = 0
    error: int = errno.EIO
    done: int = 0

    def _count(self) -> None:
        self.done += 1
        if self.done == self.fails:
            raise OSError(self.error, os.strerror(self.error))

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)

    def create(self, path: Path, *, direct: bool) -> int:
        self._count()
        return super().create(path, direct=direct)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._count()
        super().allocate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._count()
        return super().write(fd, data, offset)

    def write_back(self, fd: int, *, wait: bool) -> None:
        self._count()
        super().write_back(fd, wait=wait)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self._count()
        super().remove_directory(path)


@pytest.fixture(params=[4096, 2**20], ids=["direct writes", "buffered writes"])
def direct_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From which size on files are written directly: most of these small ones, or none."""
    monkeypatch.setattr("checkflow.store.format.disk.DIRECT_BYTES", request.param)


def operations(tmp_path: Path) -> int:
    """How many operations the second checkpoint needs, its pruning included."""
    disk = FailingDisk()
    saver = InProcess(tmp_path / "counted", disk=disk, retention=Retention(last=1))
    saver.persist(1)
    first = disk.done
    saver.persist(2)
    saver.close()
    return disk.done - first


@pytest.mark.usefixtures("direct_bytes")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_each_operation_fails_in_turn(tmp_path: Path, memory_path: Path, error: int) -> None:
    """Whatever fails is reported once; the store restores the old or the new checkpoint, and takes the next one."""
    count = operations(tmp_path)
    assert count > 20
    for number in range(1, count + 1):
        store = memory_path / str(number)
        disk = FailingDisk(error=error)
        saver = InProcess(store, disk=disk, retention=Retention(last=1))
        saver.persist(1)
        disk.fails = disk.done + number
        del saver.reports[:]
        saver.persist(2)
        failures = [report for report in saver.reports if isinstance(report, FailedReport | Notice)]
        assert len(failures) == 1, number
        assert os.strerror(error) in failures[0].message
        durable = any(isinstance(report, DurableReport) for report in saver.reports)
        assert newest_whole(store) in ((2,) if durable else (1, 2))
        saver.persist(3)
        assert isinstance(saver.reports[-1], VerifiedReport), number
        assert newest_whole(store) == 3
        saver.persister.remove_leftovers()
        assert not [path for path in store.iterdir() if path.name.startswith((INCOMPLETE, PRUNED))]
        saver.close()


def test_messages_name_the_store_and_what_to_do(tmp_path: Path) -> None:
    """One line: the store, the iteration, the reason, the way out."""
    disk = FailingDisk(fails=4, error=errno.ENOSPC)
    saver = InProcess(tmp_path / "store", disk=disk)
    saver.persist(7)
    (failure,) = saver.reports
    assert isinstance(failure, FailedReport)
    assert failure.message == (
        f"{tmp_path / 'store'}: the checkpoint of iteration 7 cannot be made durable (No space left on device); free "
        "space, or retain fewer checkpoints; checkpoints that were durable before still are"
    )
    saver.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_full_disk_waits_for_what_is_being_pruned(tmp_path: Path, error: int) -> None:
    """The write is tried once more after that, and only after that; another error is one at once."""
    disk = FailingDisk(error=error)
    saver = InProcess(tmp_path / "store", disk=disk, retention=Retention(last=1))
    saver.persist(1)
    pending = [saver.persister.write(saver.take(2))]

    def settled() -> bool:
        waited = bool(pending)
        while pending:
            written = pending.pop()
            assert written is not None
            saver.persister.settle((written,))
        return waited

    disk.fails = disk.done + 4
    written = saver.persister.write(saver.take(3), settled)
    assert (written is not None) == (error == errno.ENOSPC)
    assert not pending
    assert newest_whole(tmp_path / "store") == (3 if written is not None else 2)
    disk.fails = disk.done + 4
    assert saver.persister.write(saver.take(4), settled) is None
    saver.close()


def test_a_disk_that_stays_full_is_tried_twice(tmp_path: Path) -> None:
    """However often pruning has made room."""

    class Full(LocalDisk):
        tries = 0

        def make_directory(self, path: Path) -> None:  # noqa: ARG002
            self.tries += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Full()
    saver = InProcess(tmp_path / "store", disk=disk)
    assert saver.persister.write(saver.take(1), lambda: True) is None
    assert disk.tries == 2
    saver.close()


def test_a_thread_that_cannot_be_started_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other lack, while writing and while reading back; it does not end the saver."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    saver = InProcess(tmp_path / "store", retention=Retention(last=1))
    saver.persist(1)
    for where, told in (("write_checkpoint", FailedReport), ("verify_written", Notice)):
        with monkeypatch.context() as patched:
            patched.setattr(f"checkflow.store.saver.persister.{where}", refuse)
            saver.persist(2)
        failure = saver.reports[-1]
        assert isinstance(failure, told)
        assert "can't start new thread); allow more processes" in failure.message
        assert newest_whole(tmp_path / "store") >= 1
    saver.close()


def test_leftovers_are_removed_whatever_is_among_them(tmp_path: Path) -> None:
    """One that cannot be removed does not keep the others; of a link only the link goes."""
    saver = InProcess(tmp_path / "store")
    store, victim = tmp_path / "store", tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (store / f"{INCOMPLETE}a").symlink_to(victim)
    (store / f"{INCOMPLETE}b" / "folder").mkdir(parents=True)
    (store / f"{INCOMPLETE}c").mkdir()
    with pytest.raises(OSError, match="directory"):
        saver.persister.remove_leftovers()
    assert sorted(path.name for path in store.glob(f"{INCOMPLETE}*")) == [f"{INCOMPLETE}b"]
    assert (victim / "file").read_text() == "mine"
    saver.close()


def test_one_that_did_not_read_back_is_none_of_those_to_retain(tmp_path: Path) -> None:
    """Retaining two means two that verified; the bad one is left for a person to look at."""
    disk = Flips()
    saver = InProcess(tmp_path / "store", disk=disk, retention=Retention(last=2))
    saver.persist(1)
    disk.flips = "model"
    saver.persist(2)
    disk.flips = ""
    saver.persist(3)
    assert [found.iteration for found in list_checkpoints(tmp_path / "store") if isinstance(found, Checkpoint)] == [
        3, 2, 1,
    ]  # fmt: skip
    saver.close()


def serials(store: Path) -> list[int]:
    return [found.serial for found in list_checkpoints(store) if isinstance(found, Checkpoint)]


def test_serials_go_on_after_one_that_somebody_added(tmp_path: Path) -> None:
    """They are counted, not listed before each write; one that was moved in is seen once a group is settled."""
    ahead = tmp_path / "other"
    (ahead / directory_name(49, 1)).mkdir(parents=True)
    other = InProcess(ahead)
    other.persist(7)
    other.close()
    saver = InProcess(tmp_path / "store")
    saver.persist(1)
    (ahead / directory_name(50, 7)).rename(saver.store / directory_name(50, 7))
    saver.persist(2)
    saver.persist(3)
    assert serials(saver.store) == [51, 50]
    saver.close()


class LateDisk(LocalDisk):
    """Fails to make the names in a store durable."""

    failing = False

    def sync_directory(self, path: Path) -> None:
        if self.failing and path.name == "store":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)


def test_no_serial_is_given_twice(tmp_path: Path) -> None:
    """Whatever is left of one that could not be made durable; no whole one is, or each try would add one."""
    disk = LateDisk()
    saver = InProcess(tmp_path / "store", disk=disk, retention=Retention(last=3))
    saver.persist(1)
    disk.failing = True
    saver.persist(2)
    disk.failing = False
    saver.persist(3)
    assert [type(report) for report in saver.reports] == [
        DurableReport, VerifiedReport, FailedReport, Notice, DurableReport, VerifiedReport,
    ]  # fmt: skip
    assert serials(saver.store) == [3, 1]
    saver.close()


def verified(saver: InProcess) -> list[int]:
    return [report.iteration for report in saver.reports if isinstance(report, VerifiedReport)]


def on_disk(saver: InProcess) -> list[int]:
    return [found.iteration for found in list_checkpoints(saver.store)]


def test_of_several_only_what_is_retained_is_read_back(tmp_path: Path) -> None:
    """The newest two, those at a multiple of five and those to keep, though all are settled together."""
    saver = InProcess(tmp_path / "store", retention=Retention(last=2, every=5))
    saver.persist(1, 2, 3)
    assert (verified(saver), on_disk(saver)) == ([2, 3], [3, 2])
    saver.persist(4, keep=True)
    saver.persist(5, 6, 7, 8)
    assert (verified(saver), on_disk(saver)) == ([2, 3, 4, 5, 7, 8], [8, 7, 5, 4])
    assert [report.pruned for report in saver.reports if isinstance(report, VerifiedReport)] == [0, 1, 1, 0, 0, 2]
    saver.close()


def test_of_several_the_bad_ones_make_none_needless(tmp_path: Path) -> None:
    """An older one is read back in the place of each; where none reads back none is removed."""
    disk = Flips()
    saver = InProcess(tmp_path / "store", disk=disk, retention=Retention(last=1))
    saver.persist(1)
    disk.iterations = frozenset({4, 5})
    saver.persist(2, 3, 4, 5)
    assert (verified(saver), on_disk(saver)) == ([1, 3], [5, 4, 3])
    disk.iterations = frozenset({6, 7})
    saver.persist(6, 7)
    assert (verified(saver), on_disk(saver)) == ([1, 3], [7, 6, 5, 4, 3])
    assert newest_whole(tmp_path / "store") == 3
    assert [report.message.split()[2] for report in saver.reports if isinstance(report, FailedReport)] == [
        "00000005-iteration-5", "00000004-iteration-4", "00000007-iteration-7", "00000006-iteration-6",
    ]  # fmt: skip
    saver.close()


def test_one_that_could_not_be_read_back_takes_no_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that were read are retained; the other one is pruned with the next."""
    saver = InProcess(tmp_path / "store", retention=Retention(last=2))

    def read(checkpoint: Checkpoint, *_: object, **__: object) -> None:
        if checkpoint.iteration == 2:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("checkflow.store.saver.persister.verify_written", read)
    saver.persist(1, 2, 3)
    assert (verified(saver), on_disk(saver)) == ([1, 3], [3, 2, 1])
    saver.persist(4)
    assert on_disk(saver) == [4, 3]
    saver.close()


def test_one_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path) -> None:
    """What is left of it is told; the next saver removes it."""

    class Sticky(LocalDisk):
        def unlink(self, path: Path) -> None:
            if "-iteration-2" in path.parent.name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(path)

        def rename(self, source: Path, target: Path) -> None:
            if target.name.startswith(PRUNED) and source.name.endswith("-iteration-1"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().rename(source, target)

    saver = InProcess(tmp_path / "store", disk=Sticky(), retention=Retention(last=1))
    saver.persist(1, 2, 3, 4)
    (told,) = (report for report in saver.reports if isinstance(report, Notice))
    assert "old checkpoints cannot be removed" in told.message
    assert on_disk(saver) == [4, 1]
    assert len(list(saver.store.glob(f"{PRUNED}*"))) == 1
    saver.close()


def test_a_folder_in_a_checkpoint_keeps_no_byte_of_it(tmp_path: Path) -> None:
    """Of one that is pruned; it is told once what to remove, and what is left goes with the next one once that is."""
    saver = InProcess(tmp_path / "store", retention=Retention(last=1))
    saver.persist(1)
    (saver.store / "00000001-iteration-1" / "@eaDir").mkdir()
    saver.persist(2)
    saver.persist(3)
    (left,) = saver.store.glob(f"{PRUNED}*")
    assert [path.name for path in left.iterdir()] == ["@eaDir"]
    (told,) = (report.message for report in saver.reports if isinstance(report, Notice))
    assert f"(Is a directory: {left / '@eaDir'}); remove that folder; " in told
    assert on_disk(saver) == [3]
    (left / "@eaDir").rmdir()
    saver.persist(4)
    assert not list(saver.store.glob(f"{PRUNED}*"))
    assert [report.pruned for report in saver.reports if isinstance(report, VerifiedReport)][-1] == 1
    saver.close()


class Flips(LocalDisk):
    """Writes a wrong bit to files whose names begin so, or to the model of these iterations."""

    flips = ""
    iterations: frozenset[int] = frozenset()

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        wrong = bytearray(data)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        wanted = any(f"-iteration-{iteration}-" in path.parent.name for iteration in self.iterations)
        if (self.flips and path.name.startswith(self.flips)) or (wanted and path.name.startswith("model")):
            wrong[100] ^= 1
        return super().write(fd, memoryview(wrong), offset)


@pytest.mark.parametrize("to_cache", [False, True])
@pytest.mark.parametrize("name", ["model", "manifest"])
def test_a_bad_disk_prunes_nothing(tmp_path: Path, name: str, to_cache: bool) -> None:
    """What does not read back as written, be it the manifest alone, is reported, and the old checkpoint stays."""
    disk = Flips()
    saver = InProcess(tmp_path / "store", disk=disk, retention=Retention(last=1))
    saver.persist(1)
    disk.flips = name
    written = saver.persister.write(saver.take(2))
    assert written is not None
    saver.persister.settle((written,), to_cache=to_cache)
    assert isinstance(saver.reports[-1], FailedReport)
    assert "does not read back" in saver.reports[-1].message
    assert newest_whole(tmp_path / "store") == 1
    saver.close()


def test_a_saver_looks_at_each_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own when it reads them back, at its predecessor's when it first prunes; and it still prunes these."""
    looked: list[str] = []

    def look(store: Path, name: str) -> Checkpoint | SkippedCheckpoint:
        looked.append(name)
        return examine(store, name)

    monkeypatch.setattr("checkflow.store.saver.persister.examine", look)
    former = InProcess(tmp_path / "store")
    for iteration in (1, 2, 3):
        former.persist(iteration)
    assert looked == []
    former.close()
    saver = InProcess(tmp_path / "store")
    for iteration in (4, 5, 6):
        saver.persist(iteration)
    assert sorted(looked) == ["00000002-iteration-2", "00000003-iteration-3"]
    assert [found.iteration for found in list_checkpoints(tmp_path / "store")] == [6, 5]
    saver.close()


def test_a_manifest_that_could_not_be_read_once_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a moment's error left alone is pruned later."""
    former = InProcess(tmp_path / "store")
    former.persist(1)
    former.close()
    refused: list[str] = []

    def look(store: Path, name: str) -> Checkpoint | SkippedCheckpoint:
        if refused:
            return examine(store, name)
        refused.append(name)
        return SkippedCheckpoint(store / name, 1, 1, "cannot be read")

    monkeypatch.setattr("checkflow.store.saver.persister.examine", look)
    saver = InProcess(tmp_path / "store", retention=Retention(last=1))
    saver.persist(2)
    assert [found.iteration for found in list_checkpoints(tmp_path / "store")] == [2, 1]
    saver.persist(3)
    assert [found.iteration for found in list_checkpoints(tmp_path / "store")] == [3]
    saver.close()


def test_a_deleted_store_is_reported(tmp_path: Path) -> None:
    """Nobody makes it again behind the user's back."""
    saver = InProcess(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    saver.persist(1)
    (failure,) = saver.reports
    assert isinstance(failure, FailedReport) and "do not remove a store" in failure.message
    assert not (tmp_path / "store").exists()
    saver.close()


def test_retention(tmp_path: Path) -> None:
    """The last two, each fourth, and what was marked stay."""
    saver = InProcess(tmp_path / "store", retention=Retention(last=2, every=4))
    for iteration in range(1, 11):
        saver.persist(iteration, keep=iteration == 5)
    found = list_checkpoints(tmp_path / "store")
    assert [checkpoint.iteration for checkpoint in found] == [10, 9, 8, 5, 4]
    assert [
        checkpoint.iteration for checkpoint in found if isinstance(checkpoint, Checkpoint) and checkpoint.manifest.keep
    ] == [5]
    saver.close()


def write_file(
    disk: Disk, path: Path, pieces: Sequence[memoryview], size_bytes: int, digest: Callable[[memoryview], str] = str
) -> str:
    with NewFiles(disk) as files:
        digests = files.write(path, pieces, size_bytes, digest)
        files.sync()
    return digests


class NotingDisk(LocalDisk):
    """Notes what is done with which file."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def _note(self, what: str, fd: int) -> None:
        self.done.append((what, Path(f"/proc/self/fd/{fd}").readlink().name))

    def create(self, path: Path, *, direct: bool) -> int:
        self.done.append(("create", path.name))
        return super().create(path, direct=direct)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._note("write", fd)
        return super().write(fd, data, offset)

    def write_back(self, fd: int, *, wait: bool) -> None:
        self._note("wait" if wait else "write back", fd)
        super().write_back(fd, wait=wait)

    def sync(self, fd: int) -> None:
        self._note("sync", fd)
        super().sync(fd)


def test_what_files_share_is_written_once(tmp_path: Path) -> None:
    """The device is given all, at once, and has it before the first is synced; the manifest is synced last."""
    disk = NotingDisk()
    saver = InProcess(tmp_path / "store", disk=disk)
    saver.persist(1)
    saver.close()
    names = [*(file.name for file in SMALL.files), "commit.json", "manifest.json"]
    assert [done for done in disk.done if done[0] != "write"] == [
        (what, name) for what in ("create", "write back", "wait", "sync") for name in names
    ]


def test_each_step_of_a_slow_disk_is_progress(tmp_path: Path) -> None:
    """Else a saver that gives a slow disk one large file after the other is taken for one that hangs."""
    disk = NotingDisk()
    with NewFiles(disk, lambda: disk.done.append(("progress", ""))) as files:
        for name in ("a", "b"):
            files.write(tmp_path / name, [memoryview(b"data")], 4)
        del disk.done[:]
        files.sync()
    steps = [(what, name) for what in ("write back", "wait", "sync") for name in ("a", "b")]
    assert disk.done == [done for step in steps for done in (step, ("progress", ""))]


class PickyDisk(LocalDisk):
    """Refuses direct writes at the write, or at the open, or writes a few bytes at a time."""

    def __init__(self, *, at_open: bool = False, at_write: bool = False, short_bytes: int = 2**30) -> None:
        self.at_open, self.at_write, self.short_bytes = at_open, at_write, short_bytes
        self.direct: set[int] = set()

    def create(self, path: Path, *, direct: bool) -> int:
        fd = super().create(path, direct=direct and not self.at_open)
        self.direct.discard(fd)  # of a file that is closed since
        if direct and not self.at_open:
            self.direct.add(fd)
        return fd

    def set_buffered(self, fd: int) -> None:
        super().set_buffered(fd)
        self.direct.discard(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self.direct and (self.at_write or offset % 4096 or len(data) % 4096):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(fd, data[: self.short_bytes], offset)


@pytest.mark.parametrize(
    "disk",
    [
        PickyDisk(),
        PickyDisk(at_open=True),
        PickyDisk(at_write=True),
        PickyDisk(short_bytes=4096),
        PickyDisk(short_bytes=1000),
    ],
    ids=["direct", "refused at open", "refused at write", "short", "short and unaligned"],
)
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 20_000, 200_000])
@pytest.mark.parametrize("direct_bytes", [0, 2**20], ids=["direct if taken", "buffered"])
def test_a_file_is_written_whatever_the_file_system_takes(
    tmp_path: Path, disk: PickyDisk, size: int, direct_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct, buffered from the open or from a write's EINVAL on, and in short writes: the same bytes."""
    data = os.urandom(size)
    monkeypatch.setattr("checkflow.store.format.disk.DIRECT_BYTES", direct_bytes)
    monkeypatch.setattr(
        "checkflow.store.format.disk.WRITE_BYTES", 65536
    )  # above it several writes are on their way at once
    whole = buffer_of(size)
    whole[:size] = data
    parts = [whole[start : start + 8192] for start in range(0, len(whole), 8192)]
    digests = write_file(disk, tmp_path / "file", parts, size, lambda part: f"{len(part)} ")
    assert sum(map(int, digests.split())) == size  # nothing beyond the file's end
    assert (tmp_path / "file").read_bytes() == data


def test_only_a_large_files_last_bytes_are_buffered(tmp_path: Path) -> None:
    """Direct writes leave the training beside them its page cache; a file smaller than 1 MiB is not worth it."""
    modes: list[tuple[bool, int]] = []

    class Watched(PickyDisk):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            modes.append((fd in self.direct, len(data)))
            return super().write(fd, data, offset)

    disk = Watched()
    whole = buffer_of(2**20 + 100)
    write_file(disk, tmp_path / "large", [whole], 2**20 + 100)
    write_file(disk, tmp_path / "small", [whole], 2**20 - 1)
    assert modes == [(True, 2**20), (False, 100), (False, 2**20 - 1)]


def test_the_last_bytes_wait_for_the_pieces_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of two pieces, the first of which is still hashed while the second, of 100 bytes, is written."""
    monkeypatch.setattr("checkflow.store.format.disk.WRITE_BYTES", 2**20)
    modes: list[tuple[bool, int]] = []
    hashed = threading.Event()

    class Watched(PickyDisk):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            modes.append((fd in self.direct, len(data)))
            return super().write(fd, data, offset)

    def digest(piece: memoryview) -> str:
        if len(piece) == 100:
            hashed.set()
        else:
            assert hashed.wait(60)
            time.sleep(0.05)  # the other piece has its turn
        return ""

    whole = buffer_of(2**20 + 100)
    write_file(Watched(), tmp_path / "file", [whole[: 2**20], whole[2**20 :]], 2**20 + 100, digest)
    assert modes == [(True, 2**20), (False, 100)]


class Refuses:
    """A C library in which one call fails."""

    def __init__(self, call: str, error: int) -> None:
        self._call, self._error = call, error

    def __getattr__(self, call: str) -> Callable[..., int]:
        def answer(*_: object) -> int:
            ctypes.set_errno(self._error)
            return -1 if call == self._call else 0

        return answer


@pytest.mark.parametrize(
    ("call", "error", "fatal"),
    [
        ("fallocate", errno.EOPNOTSUPP, False),
        ("fallocate", errno.ENOSYS, False),
        ("fallocate", errno.EINVAL, False),
        ("fallocate", errno.ENOSPC, True),
        ("sync_file_range", errno.ENOSYS, False),
        ("sync_file_range", errno.EOPNOTSUPP, True),  # a device's answer to a write, which the call took with it
        ("sync_file_range", errno.EINVAL, True),
        ("sync_file_range", errno.EIO, True),
    ],
)
def test_what_a_file_system_cannot_do_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, fatal: bool
) -> None:
    """The file is then simply written and synced; any other refusal is one."""
    monkeypatch.setattr("checkflow.store.format.disk.DIRECT_BYTES", 0)
    monkeypatch.setattr("checkflow.store.format.disk.LIBC", Refuses(call, error))
    with pytest.raises(OSError, match=os.strerror(error)) if fatal else contextlib.nullcontext():
        write_file(LocalDisk(), tmp_path / "file", [memoryview(b"data")], 4)
    assert fatal or (tmp_path / "file").read_bytes() == b"data"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A file that exists is an error, not a target."""
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(LocalDisk(), tmp_path / "file", [memoryview(b"new")], 3)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_wrong_size_is_no_file(tmp_path: Path) -> None:
    """Fewer bytes than promised are an error before anything is synced."""
    with pytest.raises(OSError, match="5 bytes were given for a file of 9999"):
        write_file(LocalDisk(), tmp_path / "file", [memoryview(b"short")], 9999)


def test_the_layout_is_what_lies_on_disk(tmp_path: Path) -> None:
    """Names and sizes of a checkpoint's files, and no more of them."""
    saver = InProcess(tmp_path / "store")
    saver.persist(3)
    (checkpoint,) = list_checkpoints(tmp_path / "store")
    sizes = {path.name: path.stat().st_size for path in checkpoint.path.iterdir()}
    assert checkpoint.path.name == "00000001-iteration-3"
    assert set(sizes) == {"model.safetensors", "optimizer.safetensors", "commit.json", "manifest.json"}
    assert all(sizes[file.name] == file.size_bytes for file in SMALL.files)
    saver.close()
