"""What the page cache has is read from it, where the reader needs the bytes and no proof of the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from small_store import InProcess, fill, newest_whole, record_of, silent, stage

from checkflow.errors import CorruptStoreError
from checkflow.store.both.lock import LOCK
from checkflow.store.both.words import CLOSE, LAST, NOW, WAKE
from checkflow.store.format import blocks
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.reader import Checkpoint, list_checkpoints, verify, verify_written
from checkflow.store.saver.loop import Saver
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.store.trainer.supervisor import Supervisor

BLOCKS = 3
LARGE = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (BLOCKS * 2**22 - 10_000,)),)),))


@pytest.fixture
def store(memory_path: Path) -> Path:
    """A store with a checkpoint of iteration 1."""
    saver = InProcess(memory_path / "store", LARGE)
    saver.persist(1)
    saver.close()
    return memory_path / "store"


class Reads:
    """Counts the bytes that each way gave; of (offset, size) the page cache is made to give so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gives: Callable[[int, int], int]) -> None:
        self.cached_bytes = self.direct_bytes = self.asked = 0
        read = os.preadv

        def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if flags != os.RWF_NOWAIT:
                got = read(fd, buffers, offset)
                self.direct_bytes += got
                return got
            self.asked += 1
            size = gives(offset, len(buffers[0]))
            if size == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            got = read(fd, [buffers[0][:size]], offset)
            self.cached_bytes += got
            return got

        monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("parallel_bytes", [0, 2**30], ids=["in threads", "alone"])
@pytest.mark.parametrize("part", [0, 1, 4096, 5000, 2**21 + 1], ids=lambda part: f"{part} bytes")
@pytest.mark.parametrize("whole", range(BLOCKS + 1))
def test_a_file_that_is_cached_in_part_is_whole(
    store: Path, monkeypatch: pytest.MonkeyPatch, parallel_bytes: int, part: int, whole: int
) -> None:
    """Blocks from the cache, one of which it gives a part, and the rest from the device."""
    monkeypatch.setattr(blocks, "PARALLEL_BYTES", parallel_bytes)
    monkeypatch.setattr(blocks, "THREADS", 2)
    reads = Reads(monkeypatch, lambda offset, size: size if offset < whole * 2**22 else min(part, size))
    assert newest_whole(store, LARGE) == 1
    assert parallel_bytes == 0 or reads.cached_bytes >= min(whole * 2**22, LARGE.files[0].size_bytes)
    assert (reads.direct_bytes == 0) == (whole == BLOCKS)
    if parallel_bytes:  # each block until the first that it does not have, and the commit record
        assert reads.asked == min(whole + 1, BLOCKS) + 1


def test_verifying_does_not_ask_the_cache(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would prove nothing about the disk."""
    reads = Reads(monkeypatch, lambda _, size: size)
    (found,) = list_checkpoints(store)
    assert isinstance(found, Checkpoint)
    verify(found)
    assert reads.asked == 0
    assert reads.direct_bytes >= LARGE.files[0].size_bytes


def test_a_cached_block_that_is_wrong_is_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has it as it was written; where that is wrong too, it is refused."""
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        got = read(fd, buffers, offset)
        if flags == os.RWF_NOWAIT:
            buffers[0][7] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    assert newest_whole(store, LARGE) == 1
    path = list_checkpoints(store)[0].path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptStoreError, match="not what was written"):
        newest_whole(store, LARGE)


@pytest.mark.parametrize("to_cache", [False, True])
def test_what_is_read_back_is_forgotten_before(store: Path, to_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, the manifest too: a byte that the page cache has right and the disk wrong would not be seen."""
    (found,) = list_checkpoints(store)
    assert isinstance(found, Checkpoint)
    forgotten: set[str] = set()
    direct: set[bool] = set()
    forget, read = os.posix_fadvise, os.preadv

    def posix_fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        forget(fd, offset, length, advice)
        forgotten.add(Path(f"/proc/self/fd/{fd}").readlink().name)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert Path(f"/proc/self/fd/{fd}").readlink().name in forgotten
        direct.add(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    monkeypatch.setattr(os, "preadv", preadv)
    verify_written(found, to_cache=to_cache)
    assert forgotten == {path.name for path in found.path.iterdir()}
    assert not (to_cache and True in direct)


@pytest.mark.parametrize(
    ("said", "gone", "to_cache"),
    [([CLOSE], False, False), ([LAST, CLOSE], False, True), ([], True, True)],
    ids=["not told", "told that it is the last", "trainer gone"],
)
def test_the_last_checkpoint_is_left_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[bytes], gone: bool, to_cache: bool
) -> None:
    """Those that are read back while a trainer runs are not: it may need the memory."""
    ways: list[bool] = []

    def look(_checkpoint: Checkpoint, _progress: object, *, to_cache: bool) -> None:
        ways.append(to_cache)

    monkeypatch.setattr("checkflow.store.saver.persister.verify_written", look)
    trainer = InProcess(tmp_path / "store", LARGE)
    slot = trainer.slots.try_acquire()
    assert slot is not None
    fill(slot.data, LARGE, 1)
    trainer.slots.stage(slot, 1, record_of(1), due=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    with ours, theirs:
        for word in said:
            ours.send(word)
        if gone:
            ours.close()
        store = trainer.store
        fds = os.open(store, os.O_RDONLY), os.open(store / LOCK, os.O_CREAT | os.O_RDWR)
        saver = Saver(trainer.shared, LocalDisk(), theirs, pidfd, store, *fds)
        saver.run()
        saver._settler.close()
    for fd in (pidfd, *fds):
        os.close(fd)
    trainer.close()
    assert ways == [to_cache]


def test_closing_says_that_no_training_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it asks for the last checkpoint: a large one is read back as soon as it is durable."""
    words: list[bytes] = []
    tell = Supervisor.tell

    def told(supervisor: Supervisor, word: bytes) -> None:
        words.append(word)
        tell(supervisor, word)

    monkeypatch.setattr(Supervisor, "tell", told)
    with StoreHandle.open(tmp_path, [LARGE], notify=silent, persist_every=PersistEvery(iterations=10)) as handle:
        assert stage(handle, LARGE, 1)
        assert words == [WAKE]  # for the first slot
    assert words[1:3] == [LAST, NOW]
