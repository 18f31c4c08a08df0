"""Too few descriptors, memory or threads say nothing about a disk: no checkpoint is called wrong for it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_store import InProcess, newest_whole

from checkflow.cli import run
from checkflow.errors import CorruptStoreError, StoreError
from checkflow.store.both.messages import Notice, VerifiedReport
from checkflow.store.format import blocks, reader
from checkflow.store.format.retention import Retention


@contextmanager
def no_descriptor() -> Iterator[None]:
    """None can be opened any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(set(range(len(in_use) + 1)) - in_use, default=0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_was_not_read_back_for_want_of_descriptors_is_pruned_in_its_turn(tmp_path: Path) -> None:
    """It is told as what it is, not as a bad disk."""
    saver = InProcess(tmp_path / "store", retention=Retention(last=1))
    saver.persist(1)
    written = saver.persister.write(saver.take(2))
    assert written is not None
    with no_descriptor():
        saver.persister.settle((written,))
    told = saver.reports[-1]
    assert isinstance(told, Notice)
    assert "Too many open files" in told.message and "ulimit -n" in told.message
    assert "disk" not in told.message
    saver.persist(3)
    assert isinstance(saver.reports[-1], VerifiedReport) and saver.reports[-1].pruned == 2
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["00000003-iteration-3"]
    saver.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    saver = InProcess(tmp_path / "store")
    saver.persist(1)
    saver.persist(2)
    saver.close()
    return tmp_path / "store"


def test_nothing_older_is_restored_for_want_of_descriptors(store: Path) -> None:
    """An error that says so; with descriptors again the newest is restored."""
    with no_descriptor(), pytest.raises(StoreError, match="Too many open files") as raised:
        newest_whole(store)
    assert not isinstance(raised.value, CorruptStoreError)
    assert newest_whole(store) == 2


def test_nothing_older_is_restored_for_want_of_memory_or_threads(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    def no_memory(*_: object) -> bytes:
        raise MemoryError

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(blocks, "buffer_of", refuse)
        scarce.setattr(reader, "buffer_of", refuse)
        with pytest.raises(StoreError, match=r"now \(Cannot allocate memory\); free memory"):
            newest_whole(store)
    with monkeypatch.context() as scarce:
        scarce.setattr(reader, "contents_of", no_memory)
        with pytest.raises(StoreError, match=r"now \(out of memory\)"):
            newest_whole(store)
    with monkeypatch.context() as scarce:
        scarce.setattr(blocks, "PARALLEL_BYTES", 0)
        scarce.setattr("threading.Thread.start", no_thread)
        with pytest.raises(StoreError, match="can't start new thread"):
            newest_whole(store)
    assert newest_whole(store) == 2


@pytest.mark.parametrize("command", ["list", "check"])
def test_commands_say_so(command: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And call nothing wrong."""
    run([command, str(store)])  # what it imports
    capsys.readouterr()
    with no_descriptor():
        assert run([command, str(store)]) == 2
    captured = capsys.readouterr()
    assert "Too many open files" in captured.err.splitlines()[-1]
    assert "wrong" not in captured.out
