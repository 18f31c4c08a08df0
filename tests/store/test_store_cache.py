"""What the page cache has is read from it, where the reader needs the bytes and no proof of the disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_store import InProcess, newest_whole, silent, stage, trainer_command, until_verified

from checkflow.errors import CorruptStoreError
from checkflow.store import blocks
from checkflow.store.handle import StoreHandle
from checkflow.store.layout import FileSpec, Layout, TensorSpec
from checkflow.store.lock import StoreLock
from checkflow.store.reader import Checkpoint, list_checkpoints, verify, verify_written
from checkflow.store.settler import GROUP_BYTES

BLOCKS = 3
LARGE = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (BLOCKS * 2**22 - 10_000,)),)),))


def cached(path: Path) -> bool:
    """Whether the page cache has a whole file; True too where the file system cannot tell."""
    fd = os.open(path, os.O_RDONLY)
    room = bytearray(2**20)
    try:
        offsets = range(0, os.fstat(fd).st_size, len(room))
        got = [os.preadv(fd, [room], offset, os.RWF_NOWAIT) for offset in offsets]
        return sum(got) == os.fstat(fd).st_size
    except BlockingIOError:
        return False
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
        return True
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def model(store: Path) -> Path:
    """The newest checkpoint's large file: smaller ones are written through the page cache."""
    return list_checkpoints(store)[0].path / "model.safetensors"


def files(store: Path) -> list[Path]:
    """The newest checkpoint's, but its manifest."""
    return [path for path in list_checkpoints(store)[0].path.iterdir() if path.name != "manifest.json"]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A store with a checkpoint, on a file system that tells what is cached."""
    saver = InProcess(tmp_path / "store", LARGE)
    saver.persist(1)
    saver.close()
    forget(model(tmp_path / "store"))
    if cached(model(tmp_path / "store")):
        pytest.skip("this file system does not tell what the page cache has")
    return tmp_path / "store"


class Reads:
    """Counts the bytes that each way gave; the page cache is made to answer `answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, int], int] | None = None) -> None:
        self.cached_bytes = self.direct_bytes = self.asked = 0
        read = os.preadv

        def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if flags != os.RWF_NOWAIT:
                got = read(fd, buffers, offset)
                self.direct_bytes += got
                return got
            self.asked += 1
            if answer is None:
                got = read(fd, buffers, offset, flags)
            else:
                size = answer(offset, len(buffers[0]))
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
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, parallel_bytes: int, part: int, whole: int
) -> None:
    """Blocks from the cache, one of which it gives a part, and the rest from the device."""
    monkeypatch.setattr(blocks, "PARALLEL_BYTES", parallel_bytes)
    monkeypatch.setattr(blocks, "THREADS", 2)
    saver = InProcess(memory_path / "store", LARGE)
    saver.persist(1)
    saver.close()
    reads = Reads(monkeypatch, lambda offset, size: size if offset < whole * 2**22 else min(part, size))
    assert newest_whole(memory_path / "store", LARGE) == 1
    assert parallel_bytes == 0 or reads.cached_bytes >= min(whole * 2**22, LARGE.files[0].size_bytes)
    assert (reads.direct_bytes == 0) == (whole == BLOCKS)
    assert reads.asked <= BLOCKS + 1  # the commit record too


def test_restoring_reads_what_is_cached_from_there(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing from the device; nothing is asked of the cache that has nothing but once for each file."""
    for path in files(told):
        path.read_bytes()
    reads = Reads(monkeypatch)
    assert newest_whole(told, LARGE) == 1
    assert reads.cached_bytes == sum(path.stat().st_size for path in files(told))
    assert reads.direct_bytes == 0
    for path in files(told):
        forget(path)
    reads = Reads(monkeypatch)
    assert newest_whole(told, LARGE) == 1
    assert reads.asked == len(files(told))
    assert reads.direct_bytes >= BLOCKS * 2**22 - 2**16


def test_verifying_does_not_believe_the_cache(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not to be asked, nor to be filled."""
    reads = Reads(monkeypatch)
    (found,) = list_checkpoints(told)
    assert isinstance(found, Checkpoint)
    verify(found)
    assert reads.asked == 0
    assert not cached(model(told))


def test_a_cached_block_that_is_wrong_is_read_again(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has it as it was written; where that is wrong too, it is refused."""
    saver = InProcess(memory_path / "store", LARGE)
    saver.persist(1)
    saver.close()
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        got = read(fd, buffers, offset)
        if flags == os.RWF_NOWAIT:
            buffers[0][7] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    assert newest_whole(memory_path / "store", LARGE) == 1
    path = model(memory_path / "store")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptStoreError, match="not what was written"):
        newest_whole(memory_path / "store", LARGE)


@pytest.mark.parametrize("to_cache", [False, True])
def test_what_is_read_back_is_forgotten_before(told: Path, to_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, the manifest too: a byte that the page cache has right and the disk wrong would not be seen."""
    (found,) = list_checkpoints(told)
    assert isinstance(found, Checkpoint)
    for path in found.path.iterdir():
        path.read_bytes()
    had: dict[str, bool] = {}
    forget, read = os.posix_fadvise, os.preadv

    def posix_fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        forget(fd, offset, length, advice)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        had[path.name] = cached(path)

    def preadv(fd: int, *arguments: Any) -> int:
        assert Path(f"/proc/self/fd/{fd}").readlink().name in had or arguments[-1] == os.RWF_NOWAIT
        return read(fd, *arguments)

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    monkeypatch.setattr(os, "preadv", preadv)
    verify_written(found, to_cache=to_cache)
    assert had == dict.fromkeys((path.name for path in found.path.iterdir()), False)


END = """
import os, signal, sys
from pathlib import Path
from small_store import silent, stage, until_verified
from checkflow.store.layout import FileSpec, Layout, TensorSpec
from checkflow.store.handle import StoreHandle
from checkflow.store.pace import PersistEvery
layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (int(sys.argv[2]),)),)),))
with StoreHandle.open(Path(sys.argv[1]), layout, notify=silent, persist_every=PersistEvery(iterations=10)) as handle:
    stage(handle, layout, 10)
    until_verified(handle, 1)
    stage(handle, layout, 11)
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("size_bytes", [2**21, GROUP_BYTES], ids=["small", "settled at once"])
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_last_checkpoint_is_left_in_the_cache(told: Path, how: str, size_bytes: int) -> None:
    """In one of three attempts at least: a machine may take its page cache back at any moment."""

    def attempt(store: Path) -> bool:
        command = trainer_command(END, store, size_bytes, how)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode != 0) == (how == "killed"), ended.stderr
        StoreLock.acquire(store, silent).close()
        assert list_checkpoints(store)[0].iteration == 11
        return all(cached(path) for path in files(store))

    assert any(attempt(told.with_name(f"{how}-{number}")) for number in range(3))


def test_a_checkpoint_of_a_running_training_leaves_the_cache_alone(told: Path) -> None:
    """It may need the memory."""
    store = told.with_name("running")
    with StoreHandle.open(store, LARGE, notify=silent) as handle:
        assert stage(handle, LARGE, 1)
        until_verified(handle, 1)
        assert not cached(model(store))
