"""A checkpoint in two steps, without a saver: the power goes or the disk refuses at any moment."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from recording_disk import RecordingDisk
from small_store import SMALL, InProcess, newest_whole, record_of
from test_store_faults import FailingDisk
from test_store_powercut import ForgetfulDisk, wrong_restores

from checkflow.errors import StoreBusyError, StoreError
from checkflow.store import alone
from checkflow.store.alone import UnderWay
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.begun import Begun, NewFile, begin, publish
from checkflow.store.format.disk import WRITE_BYTES, Disk
from checkflow.store.format.pieces import packed
from checkflow.store.format.reader import list_checkpoints
from checkflow.store.format.writer import INCOMPLETE
from checkflow.store.repair import repair_store


def files(iteration: int) -> list[NewFile]:
    """Every byte of a tensor tells the iteration."""
    found = []
    for file in SMALL.files:
        of_tensors = bytes([iteration]) * (file.size_bytes - len(file.header))
        sources = [memoryview(file.header), memoryview(of_tensors)]
        found.append(NewFile(file.name, file.size_bytes, packed(sources, file.size_bytes)))
    return found


def write(disk: Disk, store: Path, iteration: int) -> None:
    publish(disk, begin(disk, store, files(iteration)), iteration, record_of(iteration), {})


def record(store: Path, disk: RecordingDisk) -> None:
    store.mkdir()
    for iteration in (1, 2):
        write(disk, store, iteration)
        disk.told(iteration)


@pytest.mark.parametrize("direct_bytes", [4096, 2**20], ids=["direct writes", "buffered writes"])
def test_no_power_cut_loses_what_was_published(
    tmp_path: Path, memory_path: Path, direct_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkflow.store.format.disk.DIRECT_BYTES", direct_bytes)
    disk = RecordingDisk(tmp_path / "store")
    record(tmp_path / "store", disk)
    outcomes = list(wrong_restores(disk, memory_path / "cut"))
    assert len(outcomes) > 300
    assert [wrong for wrong in outcomes if wrong] == []


@pytest.mark.parametrize(
    "forgotten", ["model.safetensors", "commit.json", "manifest.json", "the checkpoint", "the store"]
)
def test_without_one_sync_it_would(tmp_path: Path, memory_path: Path, forgotten: str) -> None:
    disk = ForgetfulDisk(tmp_path / "store")
    disk.forgotten = forgotten
    record(tmp_path / "store", disk)
    assert any(wrong_restores(disk, memory_path / "cut"))


def test_each_operation_fails_in_turn(memory_path: Path) -> None:
    """The checkpoint before is what is restored, and nothing is left of the new one."""
    counting = FailingDisk()
    (memory_path / "counted").mkdir()
    write(counting, memory_path / "counted", 1)
    assert counting.done > 15
    for number in range(1, counting.done + 1):
        store = memory_path / str(number)
        store.mkdir()
        write(FailingDisk(), store, 1)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write(FailingDisk(fails=number, error=errno.ENOSPC), store, 2)
        assert newest_whole(store) == 1
        assert [path.name for path in store.iterdir()] == ["00000001-iteration-1"]
        write(FailingDisk(), store, 3)
        assert newest_whole(store) == 3
        shutil.rmtree(store)


def test_a_checkpoint_s_name_is_never_given_twice(tmp_path: Path) -> None:
    """Not where another one has come between the two steps, either."""
    disk = FailingDisk()
    first = begin(disk, tmp_path, files(1))
    write(disk, tmp_path, 5)
    publish(disk, first, 1, record_of(1), {})
    assert [found.path.name for found in list_checkpoints(tmp_path)] == ["00000002-iteration-1", "00000001-iteration-5"]


def full(*_: object) -> Begun:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_in_one_line_under_the_store_s_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "new" / "store"
    alone.publish(alone.begin(store, files(1), print), 1, record_of(1), {}, print)
    held = StoreLock.acquire(store, print)
    with pytest.raises(StoreBusyError, match="another trainer"):
        alone.begin(store, files(2), print)
    held.close()
    kept = alone.begin(store, files(2), print)
    alone.publish(alone.begin(store, files(3), print), 3, record_of(3), {}, print)
    alone.publish(kept, 2, record_of(2), {}, print)
    assert newest_whole(store) == 2
    alone.begin(store, files(4), print).end()
    assert not list(store.glob(f"{INCOMPLETE}*"))
    with monkeypatch.context() as patched:
        patched.setattr("checkflow.store.format.begun.begin", full)
        with pytest.raises(StoreError, match=r"cannot be made durable \(No space left on device\); free space"):
            alone.begin(store, files(5), print)
    begun = alone.begin(store, files(5), print)
    (begun.begun.directory / "commit.json").mkdir()
    with pytest.raises(StoreError, match="File exists"):
        alone.publish(begun, 5, record_of(5), {}, print)
    assert newest_whole(store) == 2


def test_what_a_dead_process_left_is_removed_whatever_its_number(tmp_path: Path) -> None:
    """In a container each process may have the number of the one before it."""
    left = [tmp_path / f"{INCOMPLETE}{pid}-2" for pid in (os.getpid(), 2**22)]
    for path in left:
        path.mkdir()
    alone.begin(tmp_path, files(1), print).end()
    assert not [path for path in left if path.exists()]


OTHER = """
import sys
from pathlib import Path
from checkflow.store import alone
from checkflow.store.format.begun import NewFile
alone.publish(alone.begin(Path(sys.argv[1]), [], print), 7, b"{}", {}, print)
"""


def test_what_is_begun_stays_whoever_comes_in_between(tmp_path: Path) -> None:
    """Another process that saves, or a training's saver."""
    store = tmp_path / "store"
    begun = alone.begin(store, files(1), print)
    subprocess.run([sys.executable, "-c", OTHER, str(store)], check=True)
    saver = InProcess(store)
    saver.persister.remove_leftovers()
    saver.close()
    alone.publish(begun, 1, record_of(1), {}, print)
    assert newest_whole(store) == 1
    assert [found.iteration for found in list_checkpoints(store)] == [1, 7]


def test_where_it_does_not_stay_somebody_else_was_there(tmp_path: Path) -> None:
    """On file systems without locks."""
    begun = alone.begin(tmp_path, files(1), print)
    shutil.rmtree(begun.begun.directory)
    with pytest.raises(StoreBusyError, match="another writer came in between"):
        alone.publish(begun, 1, record_of(1), {}, print)


def test_what_is_begun_and_let_go_of_is_removed(tmp_path: Path) -> None:
    """By who began it; not by its forked child."""
    begun: list[UnderWay] = [alone.begin(tmp_path, files(1), print)]
    pid = os.fork()
    if not pid:
        begun.clear()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.glob(f"{INCOMPLETE}*"))) == 1
    begun.clear()
    assert not list(tmp_path.glob(f"{INCOMPLETE}*"))


def test_a_leftover_that_cannot_be_removed_is_told_and_no_save_fails_for_it(tmp_path: Path) -> None:
    left = [tmp_path / f"{INCOMPLETE}{letter}" for letter in "abc"]
    for path in left:
        path.mkdir()
    (left[1] / "folder").mkdir()
    told: list[str] = []
    alone.publish(alone.begin(tmp_path, files(1), told.append), 1, record_of(1), {}, print)
    assert newest_whole(tmp_path) == 1
    assert [path.exists() for path in left] == [False, True, False]
    (line,) = told
    assert line.startswith(f"{tmp_path}: leftovers cannot be removed (Is a directory: ") and "Errno" not in line
    assert line.endswith("; remove them yourself")


def test_threads_of_one_process_wait_for_each_other(tmp_path: Path) -> None:
    def save(number: int) -> None:
        alone.publish(alone.begin(tmp_path, files(number), print), number, record_of(number), {}, print)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(1, 9)))
    assert sorted(found.iteration for found in list_checkpoints(tmp_path)) == list(range(1, 9))


@pytest.mark.parametrize("size", [1, 4096, 4097, WRITE_BYTES - 1, WRITE_BYTES, WRITE_BYTES + 1, 2 * WRITE_BYTES + 5])
def test_what_is_packed_is_all_of_it(size: int) -> None:
    """In pieces of 16 MiB, padded at the end, from sources that begin and end anywhere."""
    data = os.urandom(size)
    bounds = [0, size // 3, size // 3, size // 2, size]
    sources = [memoryview(data)[low:high] for low, high in itertools.pairwise(bounds)]
    pieces = list(packed(sources, size))
    assert b"".join(pieces)[:size] == data
    assert [len(piece) for piece in pieces[:-1]] == [WRITE_BYTES] * (len(pieces) - 1)
    assert len(pieces[-1]) % 4096 == 0 and sum(map(len, pieces)) - size < 4096


def test_a_repair_leaves_alone_what_is_gone_on_with(tmp_path: Path) -> None:
    """As a trainer's saver does."""
    saver = InProcess(tmp_path)
    saver.persist(1)
    saver.close()
    under_way = alone.begin(tmp_path, files(2), print)
    (tmp_path / f"{INCOMPLETE}of-one-that-was-killed").mkdir()
    told: list[str] = []
    repair_store(tmp_path, told.append, lambda _: None)
    assert len(told) == 1 and "of-one-that-was-killed" in told[0]
    alone.publish(under_way, 2, record_of(2), {}, print)
    assert newest_whole(tmp_path) == 2
