"""Shared memory mapped where the kernel can put huge pages, and advice about it.

In small pages every 4 KiB is a segment of its own in what the disk is asked for: a device takes so few of them in a
request (254, for one) that a checkpoint becomes several times as many requests, each with its interrupt, and finding
the pages costs several times the processor time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from checkflow.store.libc import LIBC, call, raise_unless

HUGE_BYTES = 2 * 2**20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 does not name it
MADV_COLLAPSE = 25  # Linux 6.1
_PROT_NONE, _MAP_FIXED = 0, 0x10
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, size_bytes: int) -> memoryview:
    """A file's first bytes, writable, at a multiple of 2 MiB; not for forked children. Unmapped with the last view.

    Raises OSError.
    """
    reserved = _mmap(None, size_bytes + HUGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    try:
        _mmap(start, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        raise_unless(advise(start, size_bytes, mmap.MADV_DONTFORK))  # a data-loader worker would only copy its table
    except OSError:
        _unmap(reserved, size_bytes + HUGE_BYTES)
        raise
    advise(start, size_bytes, mmap.MADV_HUGEPAGE)
    end = -(-(start + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _unmap(reserved, start - reserved)
    _unmap(end, reserved + size_bytes + HUGE_BYTES - end)
    memory = (ctypes.c_ubyte * size_bytes).from_address(start)
    weakref.finalize(memory, _unmap_own, os.getpid(), start, end - start).atexit = False
    return memoryview(memory).cast("B")


def address_of(view: memoryview) -> int:
    """Of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """Whether the kernel takes this advice of madvise(2)."""
    return not call(LIBC.madvise, ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)


def protect(address: int, size_bytes: int, *, writable: bool) -> bool:
    """Whether the kernel lets these pages of ours be written, or only read, from now on."""
    how = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return not LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), how)


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = LIBC.mmap(
        ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), protection, flags, fd, ctypes.c_long(0)
    )
    raise_unless(found != _FAILED)
    return found


def _unmap_own(owner: int, address: int, size_bytes: int) -> None:
    """A forked child has none of it, but maybe other memory there."""
    if os.getpid() == owner:
        _unmap(address, size_bytes)


def _unmap(address: int, size_bytes: int) -> None:
    if size_bytes:
        LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
