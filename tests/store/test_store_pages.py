"""The slots' memory: taken beside the training, in order, and used only once it is all there."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from small_store import SMALL, newest_whole, silent, stage, until

from checkflow.errors import StoreError
from checkflow.store.memory import pages
from checkflow.store.memory.mapping import map_shared
from checkflow.store.memory.pages import Pages, Span
from checkflow.store.trainer.handle import RECORD_ROOM_BYTES, StoreHandle

PAGE = mmap.PAGESIZE


class Kernel:
    """posix_fallocate, held up or refusing."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.granted: list[tuple[int, int]] = []
        self.refused_from: int | None = None
        self._really = os.posix_fallocate

    def __call__(self, fd: int, start: int, size: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.go.wait(60)
            if self.refused_from is not None and start >= self.refused_from:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._really(fd, start, size)
        self.granted.append((start, size))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Every size is large; parts are two pages."""
    kernel = Kernel()
    monkeypatch.setattr(pages, "PART_BYTES", 2 * PAGE)
    monkeypatch.setattr(os, "posix_fallocate", kernel)
    yield kernel
    kernel.go.set()


@pytest.fixture
def memory() -> Iterator[tuple[int, memoryview]]:
    fd = os.memfd_create("memory")
    os.ftruncate(fd, 16 * PAGE)
    yield fd, map_shared(fd, 16 * PAGE)
    os.close(fd)


def take_all(taken: Pages) -> None:
    while taken.wait_for_more():
        pass


SPANS = (Span(PAGE, 5 * PAGE), Span(6 * PAGE, 5 * PAGE), Span(11 * PAGE, 5 * PAGE))


def test_every_page_is_taken_span_by_span(kernel: Kernel, memory: tuple[int, memoryview]) -> None:
    """To the last byte, once."""
    taken = Pages(*memory, SPANS)
    take_all(taken)
    assert all(taken.ready(number) for number in range(3))
    assert sorted(kernel.granted)[0][0] == PAGE
    assert sum(size for _, size in kernel.granted) == sum(span.size_bytes for span in SPANS)
    assert len(kernel.granted) == 9
    assert os.fstat(memory[0]).st_blocks * 512 == 15 * PAGE
    taken.close()


def test_a_span_is_not_ready_before_its_last_page(kernel: Kernel, memory: tuple[int, memoryview]) -> None:
    kernel.go.clear()
    taken = Pages(*memory, SPANS)
    assert not any(taken.ready(number) for number in range(3))
    kernel.go.set()
    take_all(taken)
    assert taken.ready(0)
    taken.close()


def test_who_is_in_a_hurry_goes_first(kernel: Kernel, memory: tuple[int, memoryview]) -> None:
    """Paused, nothing more is taken but what had begun; then it goes on."""
    kernel.go.clear()
    taken = Pages(*memory, SPANS)
    with taken.paused():
        kernel.go.set()
        assert len(kernel.granted) <= pages.MAX_THREADS
        assert not taken.ready(2)
    take_all(taken)
    assert taken.ready(2)
    taken.close()


def test_close_does_not_wait_for_the_rest(kernel: Kernel, memory: tuple[int, memoryview]) -> None:
    kernel.go.clear()
    taken = Pages(*memory, SPANS)
    with taken.paused():
        kernel.go.set()
        taken.close()
    assert len(kernel.granted) < 9


def test_what_the_kernel_refuses_is_told_once(kernel: Kernel, memory: tuple[int, memoryview]) -> None:
    """Spans before it are used, those behind it never."""
    kernel.refused_from = 6 * PAGE
    taken = Pages(*memory, SPANS)
    take_all(taken)
    assert not taken.wait_for_more()
    assert [taken.ready(number) for number in range(3)] == [True, False, False]
    told = taken.take_refusal()
    assert told is not None and "refuses the memory of 2 of 3 (Cannot allocate memory), and with 1 nothing more" in told
    assert taken.take_refusal() is None
    taken.close()


@pytest.mark.parametrize("when_full", ["skip", "wait"])
def test_a_checkpoint_waits_for_its_slot_to_have_memory(
    tmp_path: Path, kernel: Kernel, when_full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither skipped nor torn, and the wait is counted."""
    kernel.go.clear()
    wait = Pages.wait_for_more

    def waits(taken: Pages) -> bool:
        threading.Timer(0.1, kernel.go.set).start()
        return wait(taken)

    monkeypatch.setattr(Pages, "wait_for_more", waits)
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, when_full=when_full) as handle:  # type: ignore[arg-type]
        assert handle.try_acquire() is None
        assert stage(handle, SMALL, 1)
        status = handle.status()
        assert status.skipped == 0 and status.blocked_ns > 50_000_000
    assert newest_whole(tmp_path) == 1


def test_refused_memory_is_an_error_but_no_lost_checkpoint(tmp_path: Path, kernel: Kernel) -> None:
    """The slots that there are go on being used."""
    kernel.refused_from = 2 * PAGE + 2 * (SMALL.size_bytes + RECORD_ROOM_BYTES)  # slot 2
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent)
    with pytest.raises(StoreError, match=r"refuses the memory of 1 of 3 .* goes on with 2: use slots=2"):
        handle.take_memory()
    handle.poll()  # said once
    for iteration in (1, 2, 3):
        until(partial(stage, handle, SMALL, iteration), "the saver has let go of one")
    handle.close()
    assert newest_whole(tmp_path) == 3


def test_no_memory_at_all(tmp_path: Path, kernel: Kernel) -> None:
    """Nothing is staged, nothing hangs, and the next poll says why."""
    kernel.refused_from = 0
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent, when_full="wait")
    assert handle.acquire() is None
    with pytest.raises(StoreError, match="with 0 nothing more is checkpointed"):
        handle.poll()
    handle.close()


def test_without_threads_memory_is_taken_at_once(
    kernel: Kernel, memory: tuple[int, memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    taken = Pages(*memory, SPANS)
    assert len(kernel.granted) == 9 and all(taken.ready(number) for number in range(3))
    taken.close()


def test_little_memory_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _start: int, _size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match=r"need .* of shared memory; the system refuses it"):
        StoreHandle.open(tmp_path, [SMALL], notify=silent)
    monkeypatch.undo()
    StoreHandle.open(tmp_path, [SMALL], notify=silent).close()


def test_a_program_that_ends_without_closing_waits_for_no_memory() -> None:
    """Nor does a child that it forked, and neither says anything."""
    program = """
import os, sys, threading
from checkflow.store.memory import pages
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
pages.PART_BYTES = 4096
os.posix_fallocate = lambda fd, start, size: threading.current_thread() is threading.main_thread() or endless.wait()
endless = threading.Event()
layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (100_000,)),)),))
shared = SharedMemory.create([layout], slots=2, record_room_bytes=100, config=b"{}")
assert not shared.pages.ready(0)
child = os.fork()
if not child:
    shared.close()
    sys.exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
