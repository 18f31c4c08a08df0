"""The slots' mapping: where huge pages can lie, asked for, and gone with its last view."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.store import mapping, pages
from checkflow.store.mapping import HUGE_BYTES, MADV_COLLAPSE, MADV_POPULATE_WRITE, address_of, map_shared
from checkflow.store.pages import Pages, Span

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
    """Neither while a part of it is held, nor in a child that was forked; nothing beside it stays reserved."""
    before = Path("/proc/self/maps").read_text().count("memfd:mapping")
    view = map_shared(fd, SIZE)
    start = address_of(view)
    part = view[HUGE_BYTES : HUGE_BYTES + 8]
    view.release()
    part[0] = 1
    assert mapped(start, SIZE)
    child = os.fork()
    if not child:
        absent = not mapped(start, SIZE)
        there = mmap.mmap(-1, mmap.PAGESIZE)
        mapping._mmap(start, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1)
        part.release()
        os._exit(0 if absent and mapped(start, mmap.PAGESIZE) and there[0] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mapped(start, SIZE)
    part.release()
    assert Path("/proc/self/maps").read_text().count("memfd:mapping") == before


def test_what_cannot_be_mapped_is_an_error(fd: int) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        map_shared(fd, 2**60)
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(10**6, mmap.PAGESIZE)


class Advice:
    """Records what is asked of the kernel, which takes it or not."""

    def __init__(self, *, taken: bool) -> None:
        self.taken = taken
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, address: int, size_bytes: int, advice: int) -> bool:
        self.asked.append((advice, address, size_bytes))
        return self.taken and mapping.advise(address, size_bytes, advice)


@pytest.mark.parametrize("taken", [True, False])
def test_slots_are_asked_for_in_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Each that lies in the mapping, once something is in it; all of the memory comes whatever the kernel says."""
    advice = Advice(taken=taken)
    monkeypatch.setattr(pages, "advise", advice)
    view = map_shared(fd, SIZE)
    start = address_of(view)
    spans = (Span(mmap.PAGESIZE, 2 * HUGE_BYTES), Span(mmap.PAGESIZE + 2 * HUGE_BYTES, SIZE - 2 * HUGE_BYTES - 4096))
    Pages(fd, start, spans)
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
    assert os.fstat(fd).st_blocks * 512 >= SIZE - mmap.PAGESIZE
