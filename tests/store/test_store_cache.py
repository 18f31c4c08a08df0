"""What the page cache has is read from it, where the reader needs the bytes and no proof of the disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from small_store import InProcess, newest_whole, silent, stage, trainer_command, until_verified

from checkflow.store import blocks
from checkflow.store.handle import StoreHandle
from checkflow.store.layout import FileSpec, Layout, TensorSpec
from checkflow.store.lock import StoreLock
from checkflow.store.reader import Checkpoint, list_checkpoints, verify

BLOCKS = 3
LARGE = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (BLOCKS * 2**22 - 10_000,)),)),))


def cached(path: Path) -> bool:
    """Whether the page cache has a whole file; True too where the file system cannot tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        return os.preadv(fd, [bytearray(size)], 0, os.RWF_NOWAIT) == size
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


END = """
import os, signal, sys
from pathlib import Path
from small_store import DIRECT, silent, stage, until_verified
from checkflow.store.handle import StoreHandle
from checkflow.store.pace import PersistEvery
with StoreHandle.open(Path(sys.argv[1]), DIRECT, notify=silent, persist_every=PersistEvery(iterations=10)) as handle:
    stage(handle, DIRECT, 10)
    until_verified(handle, 1)
    stage(handle, DIRECT, 11)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_last_checkpoint_is_left_in_the_cache(told: Path, how: str) -> None:
    """Those that are read back while a trainer runs are not: it may need the memory."""
    store = told.with_name(how)
    ended = subprocess.run(trainer_command(END, store, how), capture_output=True, text=True, check=False)
    assert (ended.returncode != 0) == (how == "killed"), ended.stderr
    StoreLock.acquire(store, silent).close()
    assert list_checkpoints(store)[0].iteration == 11
    assert all(cached(path) for path in files(store))


def test_a_checkpoint_of_a_running_training_leaves_the_cache_alone(told: Path) -> None:
    store = told.with_name("running")
    with StoreHandle.open(store, LARGE, notify=silent) as handle:
        assert stage(handle, LARGE, 1)
        until_verified(handle, 1)
        assert not cached(model(store))
