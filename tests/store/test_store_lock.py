"""What is locked is what is written: stores that are moved, a `lock` that is deleted, file systems of others."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from processes import descriptors, runs
from small_store import (
    SMALL,
    newest_whole,
    saver_of,
    silent,
    stage,
    trainer_command,
    until,
    until_idle,
    until_verified,
)

from checkflow.errors import StoreBusyError, StoreError
from checkflow.store.both import bytelocks, filesystem
from checkflow.store.both import lock as lock_module
from checkflow.store.both.bytelocks import take_of_directory
from checkflow.store.both.filesystem import Mount, mount_of
from checkflow.store.both.lock import LOCK, StoreLock, open_lock
from checkflow.store.format.disk import LocalDisk
from checkflow.store.saver import held_store
from checkflow.store.saver.held_store import HeldStore
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

EACH = PersistEvery(iterations=1)


def test_a_moved_store_takes_its_run_along(tmp_path: Path) -> None:
    """Another run at the old path has a store of its own: not a byte of the first goes there, and none is pruned."""
    store, old = tmp_path / "store", tmp_path / "store.old"
    told: list[str] = []
    with StoreHandle.open(store, [SMALL], notify=told.append, persist_every=EACH) as first:
        assert stage(first, SMALL, 1)
        until_verified(first, 1)
        store.rename(old)
        with StoreHandle.open(store, [SMALL], notify=silent, persist_every=EACH) as second:
            assert stage(second, SMALL, 100)
            until_verified(second, 1)
            for iteration in range(2, 7):
                assert stage(first, SMALL, iteration)
                until_idle(first, iteration)
            assert stage(second, SMALL, 101)
    assert sorted(path.name for path in store.glob("0*")) == ["00000001-iteration-100", "00000002-iteration-101"]
    assert sorted(path.name for path in old.glob("0*")) == ["00000005-iteration-5", "00000006-iteration-6"]
    assert [line for line in told if f"was moved to {old}" in line] == told and len(told) == 1
    assert newest_whole(old) == 6


def test_a_store_that_is_moved_twice_and_back_is_told_of_each_time(tmp_path: Path) -> None:
    store = tmp_path / "store"
    told: list[str] = []
    with StoreHandle.open(store, [SMALL], notify=told.append, persist_every=EACH) as handle:
        for iteration, name in enumerate(("a", "b", "store"), start=1):
            assert stage(handle, SMALL, iteration)
            until_idle(handle, iteration)
            store = store.rename(tmp_path / name)
    assert [line.split("was moved to ")[1].split(";")[0] for line in told] == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_deleted_lock_lets_nobody_in(tmp_path: Path, how: str) -> None:
    """The directory is locked, too; and the saver puts the file back, with its locks, before it writes."""
    told: list[str] = []
    with StoreHandle.open(tmp_path, [SMALL], notify=told.append, persist_every=EACH) as handle:
        (tmp_path / LOCK).unlink()
        if how == "replaced":
            (tmp_path / LOCK).write_bytes(b"")
        with pytest.raises(StoreBusyError, match="another trainer"):
            StoreLock.acquire(tmp_path, silent)
        assert stage(handle, SMALL, 1) and handle.drain(60)
        with pytest.raises(StoreBusyError, match=f"another trainer, process {os.getpid()} on "):
            StoreLock.acquire(tmp_path, silent)
    assert ["was deleted, and is put back" in line for line in told] == [True]
    StoreLock.acquire(tmp_path, silent, timeout_s=60).close()


def test_a_saver_without_a_trainer_is_waited_for_whatever_became_of_the_lock(tmp_path: Path) -> None:
    script = (
        "import pathlib, os, signal\nfrom small_store import *\n"
        "handle = StoreHandle.open(pathlib.Path(sys.argv[1]), [SMALL], notify=print)\n"
        "stop(handle)\n"
        "stage(handle, SMALL, 41)\n"
        "print(handle.saver_pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(trainer_command(script, tmp_path), capture_output=True, text=True, check=False)
    saver = int(killed.stdout)
    (tmp_path / LOCK).unlink()
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        os.kill(saver, signal.SIGCONT)

    StoreLock.acquire(tmp_path, tell, timeout_s=60).close()
    assert len(told) == 1 and "waiting for the previous run's saver" in told[0]
    until(lambda: not runs(saver), "the saver has ended, whose locks go first")
    assert newest_whole(tmp_path) == 41


def test_a_lock_that_another_has_meanwhile_is_trouble(tmp_path: Path) -> None:
    """As from another machine, which the directory's lock does not keep out: nothing is written beside it."""
    told: list[str] = []
    with StoreHandle.open(tmp_path, [SMALL], notify=told.append, persist_every=EACH) as handle:
        assert stage(handle, SMALL, 1)
        until_verified(handle, 1)
        (tmp_path / LOCK).unlink()
        other = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
        assert bytelocks.take(other, 0) and bytelocks.take(other, 1)
        assert stage(handle, SMALL, 2)

        def tried() -> bool:
            handle.poll()
            return bool(told)

        until(tried, "it is told")
        assert "another run has the new one), and is tried again" in told[0]
        assert newest_whole(tmp_path) == 1
        os.close(other)
        assert handle.drain(60)
    assert newest_whole(tmp_path) == 2


def test_of_two_that_come_at_once_none_has_a_directory(tmp_path: Path) -> None:
    """Who finds the other's lock beside its own takes it back."""
    one, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert take_of_directory(one, 0)
    assert not take_of_directory(other, 0)
    assert take_of_directory(other, 1)
    os.close(one)
    assert take_of_directory(other, 0)
    os.close(other)


def test_a_restarted_saver_holds_the_directory_too(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        saver = saver_of(handle)
        os.kill(saver, signal.SIGKILL)
        until(lambda: handle.saver_pid not in (None, saver), "another one runs")
        assert stage(handle, SMALL, 1) and handle.drain(60)
        assert {str(tmp_path), str(tmp_path / LOCK)} <= descriptors(saver_of(handle))


def test_the_mount_of_a_file() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    mount = mount_of(fd)
    os.close(fd)
    assert mount is not None and mount.kind == "proc" and not mount.is_remote and not mount.is_fuse
    assert mount_of(fd) is None


@pytest.mark.parametrize(
    ("mount", "told"),
    [
        (Mount("nfs4", "server:/export", frozenset({"rw"})), ["as far as its server tells the truth"]),
        (
            Mount("nfs", "server:/export", frozenset({"rw", "nolock"})),
            ["as far as its server tells the truth", "may not reach other machines"],
        ),
        (
            Mount("fuse.sshfs", "host:", frozenset({"rw"})),
            ["as far as its program tells the truth", "may not reach other machines"],
        ),
        (Mount("ext4", "/dev/sda1", frozenset({"rw"})), []),
    ],
    ids=lambda value: value.kind if isinstance(value, Mount) else "",
)
def test_a_file_system_of_somebody_else_is_tried_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount, told: list[str]
) -> None:
    """One that does what the store needs is used."""
    monkeypatch.setattr(filesystem, "mount_of", lambda _: mount)
    lines: list[str] = []
    with StoreHandle.open(tmp_path, [SMALL], notify=lines.append) as handle:
        assert stage(handle, SMALL, 1)
    assert len(lines) == len(told)
    assert all(part in line and mount.source in line for part, line in zip(told, lines, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001-iteration-1", LOCK]


class Copies(LocalDisk):
    """Renames as an object store does: one file after the other, under both names meanwhile."""

    def rename(self, source: Path, target: Path) -> None:
        target.mkdir()
        for path in source.iterdir():
            (target / path.name).write_bytes(path.read_bytes())


class Refuses(LocalDisk):
    def sync_directory(self, path: Path) -> None:
        raise OSError(22, "Invalid argument", path)


@pytest.mark.parametrize(
    ("patched", "by", "why"),
    [
        ("LocalDisk", Copies, "does not rename a directory as a whole"),
        ("LocalDisk", Refuses, "cannot write, sync and rename a directory .Invalid argument"),
        ("take", lambda *_: True, "gives one lock to two"),
    ],
)
def test_a_file_system_that_lacks_what_the_store_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: str, by: object, why: str
) -> None:
    """And left as it was."""
    monkeypatch.setattr(filesystem, "mount_of", lambda _: Mount("fuse.bucket", "bucket", frozenset()))
    monkeypatch.setattr(filesystem, patched, by)
    with pytest.raises(StoreError, match=rf"its file system, fuse\.bucket \(bucket\), {why}.*; choose a store on"):
        StoreLock.acquire(tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_what_another_makes_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one job make the directory of all at the same time."""
    make = LocalDisk.make_directory

    def too_late(disk: LocalDisk, path: Path) -> None:
        path.mkdir()
        make(disk, path)

    monkeypatch.setattr(LocalDisk, "make_directory", too_late)
    StoreLock.acquire(tmp_path / "store" / "rank-0-of-2", lambda _: None).close()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/store: cannot be (made|opened)"):
        StoreLock.acquire(tmp_path / "file" / "store", lambda _: None)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldStore]:
    """What a saver holds of a store, in this process."""
    lock = StoreLock.acquire(tmp_path, silent)
    held = HeldStore(tmp_path, os.dup(lock.directory_fd), os.dup(lock.saver_fd))
    yield held
    lock.close()
    for fd in (held._directory_fd, held._lock_fd, held._for_trainer_fd):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("covered", [True, False])
def test_a_store_that_its_path_does_not_lead_to_is_told(
    covered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where something is mounted over it, which its path in /proc does not show, or its file system is unmounted,
    when that path begins there. It is said once, until it is back; and what is in it can still be read."""
    store, below, told = tmp_path / "store", tmp_path / "below", list[str]()
    with closing(StoreLock.acquire(store, silent)) as lock:
        held = HeldStore(store, lock.directory_fd, lock.saver_fd)
        store.rename(below)
        (below / "kept").touch()
        if covered:
            store.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "_as_known", lambda _: store if covered else Path("/of-nothing"))
            for _ in range(2):
                held.look(told.append, trainer_lives=True)
            (line,) = told
            assert line.startswith("is no longer at its path (something is mounted over it, or its file system was")
            assert line.endswith("no other run finds them: unmount what covers it, or mount it again")
            assert (lock.path / "kept").exists()
        if covered:
            store.rmdir()
        below.rename(store)
        held.look(told.append, trainer_lives=True)
        assert told == [line] and lock.path == store
        store.rename(below)
        held.look(told.append, trainer_lives=True)
        assert told[1:] == [f"was moved to {below}; this run's checkpoints go there from now on"]


def test_where_a_path_cannot_be_looked_at_nothing_is_told(
    held: HeldStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody took the rights of a directory above it."""
    stat, told = Path.stat, list[str]()

    def refused(path: Path, **options: bool) -> os.stat_result:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refused)
        held.look(told.append, trainer_lives=True)
    assert not told


def test_a_full_disk_keeps_no_saver_from_its_own_lock(
    held: HeldStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds the store stands in the lock for messages alone."""
    before = len(descriptors(os.getpid()))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        (tmp_path / LOCK).unlink()
        held.look(told.append, trainer_lives=True)
    held.look(told.append, trainer_lives=True)
    assert len(told) == 1 and "is put back" in told[0]
    assert len(descriptors(os.getpid())) == before + 1  # the trainer's, which its saver holds in its place


def test_a_lock_that_cannot_be_opened_for_both_is_held_by_none(
    held: HeldStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is put back the next time."""
    (tmp_path / LOCK).unlink()
    before, calls = len(descriptors(os.getpid())), list[int]()

    def once(directory_fd: int) -> int:
        calls.append(directory_fd)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_lock(directory_fd)

    monkeypatch.setattr(held_store, "open_lock", once)
    with pytest.raises(OSError, match="Too many open files"):
        held.look(silent, trainer_lives=True)
    assert len(descriptors(os.getpid())) == before
    held.look(silent, trainer_lives=True)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), Path.mkdir, os.mkfifo])
def test_what_is_no_lock_is_to_be_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Nobody is to leave a store with checkpoints for it; once it is removed the store opens."""
    lock = tmp_path / LOCK
    make(lock)
    with pytest.raises(StoreError) as raised:
        StoreLock.acquire(tmp_path, silent)
    assert re.fullmatch(
        rf"{lock}: cannot be opened \(it is (a link, not a file|no regular file)\); remove it, and a new one is made",
        str(raised.value),
    )
    lock.rmdir() if lock.is_dir() else lock.unlink()
    StoreLock.acquire(tmp_path, silent).close()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errno.EMFILE, "allow more open files (ulimit -n)"),
        (errno.EROFS, "mount it writable"),
        (errno.ENOTDIR, "choose "),
    ],
)
def test_a_store_that_cannot_be_opened_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, advice: str
) -> None:
    """By what the system said, of the directory and of the file in it."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(error, os.strerror(error))

    lines = []
    for where, name in ((lock_module, "open_regular"), (os, "open")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, refuse)
            with pytest.raises(StoreError) as raised:
                StoreLock.acquire(tmp_path, silent)
        lines.append(str(raised.value))
    assert all(f"({os.strerror(error)}); {advice}" in line for line in lines)
