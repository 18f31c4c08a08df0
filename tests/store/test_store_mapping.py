"""The slots' mapping: where huge pages can lie, asked for, and gone with its last view."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.store.memory import mapping, pages
from checkflow.store.memory.mapping import HUGE_BYTES, MADV_COLLAPSE, MADV_POPULATE_WRITE, address_of, map_shared
from checkflow.store.memory.pages import Pages, Span

SIZE = 5 * HUGE_BYTES + 3 * mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("mapping")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mapped(start: int, size: int) -> bool:
    """Whether anything is mapped in a range."""
    rows = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) < start + size and start < int(end, 16) for first, end in rows)


def test_a_mapping_begins_where_a_huge_page_can(fd: int) -> None:
    """And is the file's, to the last byte."""
    view = map_shared(fd, SIZE)
    assert address_of(view) % HUGE_BYTES == 0
    assert len(view) == SIZE and view.format == "B" and not view.readonly
    view[SIZE - 1] = 7
    assert os.pread(fd, 2, SIZE - 1) == b"\x07"


def test_a_mapping_ends_with_its_last_view(fd: int) -> None:
    """Not while a part of it is held."""
    view = map_shared(fd, SIZE)
    start = address_of(view)
    part = view[HUGE_BYTES : HUGE_BYTES + 8]
    view.release()
    part[0] = 1
    assert mapped(start, SIZE)
    part.release()
    assert not mapped(start, SIZE)


def test_what_lies_beside_a_mapping_is_given_back(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the reservation but the file's pages, whatever address the kernel gave; of one that is refused all."""
    reserved: list[int] = []
    unmapped: list[tuple[int, int]] = []
    really_map, really_unmap = mapping._mmap, mapping._unmap

    def note_map(*given: Any) -> int:
        found = really_map(*given)
        if given[0] is None:
            reserved.append(found)
        return found

    def note_unmap(address: int, size_bytes: int) -> None:
        unmapped.append((address, address + size_bytes))
        really_unmap(address, size_bytes)

    monkeypatch.setattr(mapping, "_mmap", note_map)
    monkeypatch.setattr(mapping, "_unmap", note_unmap)
    view = map_shared(fd, SIZE)
    start = address_of(view)
    end = reserved[0] + SIZE + HUGE_BYTES
    assert unmapped == [(reserved[0], start), (start + SIZE, end)]
    view.release()
    assert unmapped[2:] == [(start, start + SIZE)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(10**6, SIZE)
    assert unmapped[3:] == [(reserved[1], reserved[1] + SIZE + HUGE_BYTES)]


def test_memory_that_a_child_would_get_is_refused(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not let go of it."""
    monkeypatch.setattr(mapping, "advise", lambda *_: False)
    before = Path("/proc/self/maps").read_text().count("memfd:mapping")
    with pytest.raises(OSError):
        map_shared(fd, SIZE)
    assert Path("/proc/self/maps").read_text().count("memfd:mapping") == before


def test_a_forked_child_has_no_mapping(fd: int) -> None:
    """And leaves alone what lies there instead."""
    view = map_shared(fd, SIZE)
    start = address_of(view)
    child = os.fork()
    if not child:
        wrong = 1
        with contextlib.suppress(BaseException):  # pytest must not go on here
            absent = not mapped(start, SIZE)
            mapping._mmap(
                start, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mapping._MAP_FIXED, -1
            )
            view.release()
            wrong = not (absent and mapped(start, mmap.PAGESIZE))
        os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert mapped(start, SIZE)


def test_memory_that_is_being_taken_stays_mapped(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever forgets to close leaves the threads that take it no address of others' memory."""
    monkeypatch.setattr(pages, "PART_BYTES", HUGE_BYTES)
    go = threading.Event()
    really = os.posix_fallocate

    def held_up(*given: int) -> None:
        assert go.wait(60)
        really(*given)

    monkeypatch.setattr(os, "posix_fallocate", held_up)
    view = map_shared(fd, SIZE)
    start = address_of(view)
    taken = Pages(fd, view, (Span(0, SIZE),))
    threads = list(taken._threads)
    view.release()
    del taken
    assert threads and mapped(start, SIZE)
    go.set()
    for thread in threads:
        thread.join()
    assert os.fstat(fd).st_blocks * 512 == SIZE
    assert not mapped(start, SIZE)


def test_what_cannot_be_mapped_is_an_error(fd: int) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        map_shared(fd, 2**60)


class Advice:
    """Records what is asked of the kernel, which takes it or not."""

    def __init__(self, *, taken: bool) -> None:
        self.taken = taken
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, address: int, size_bytes: int, advice: int) -> bool:
        self.asked.append((advice, address, size_bytes))
        return self.taken and mapping.advise(address, size_bytes, advice)


PAGE = mmap.PAGESIZE
SPANS = (Span(PAGE, 2 * HUGE_BYTES), Span(PAGE + 2 * HUGE_BYTES, SIZE - 2 * HUGE_BYTES - PAGE))


@pytest.mark.parametrize("taken", [True, False])
def test_slots_are_asked_for_in_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Each that lies in the mapping, once something is in it; all of the memory comes whatever the kernel says."""
    advice = Advice(taken=taken)
    monkeypatch.setattr(pages, "advise", advice)
    view = map_shared(fd, SIZE)
    start = address_of(view)
    Pages(fd, view, SPANS)
    collapsed: set[int] = set()
    touched: set[int] = set()
    for what, address, size_bytes in advice.asked:
        assert address >= start and address + size_bytes <= start + SIZE
        if what == MADV_POPULATE_WRITE:
            touched.add(address)
        if what == MADV_COLLAPSE:
            found = set(range(address, address + size_bytes, HUGE_BYTES))
            assert address % HUGE_BYTES == 0 and found <= touched
            collapsed |= found
    assert collapsed == {start + number * HUGE_BYTES for number in range(5)}
    assert os.fstat(fd).st_blocks * 512 >= SIZE - PAGE


def test_a_huge_page_that_cannot_be_had_costs_no_other(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give up a range at the first one: each of it is asked for by itself then."""
    advice = Advice(taken=False)
    monkeypatch.setattr(pages, "advise", advice)
    view = map_shared(fd, SIZE)
    Pages(fd, view, SPANS)
    alone = {
        address for what, address, size_bytes in advice.asked if what == MADV_COLLAPSE and size_bytes == HUGE_BYTES
    }
    assert alone == {address_of(view) + number * HUGE_BYTES for number in range(5)}
