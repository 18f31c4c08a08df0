"""Room for commit records that outgrew their slot's: at the end of the slots' memfd, as much as they need.

Who fills a slot makes it, and says where a record lies by the slot's words. It is not mapped, only written and read, so
that the mapping, which may be pinned, stays as it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from checkflow.errors import StoreError
from checkflow.store.format.layout import padded
from checkflow.store.libc import LIBC, call
from checkflow.store.memory.allowance import allowance
from checkflow.store.memory.pages import Span
from checkflow.units import format_bytes

_PUNCH_HOLE = 1 | 2  # and keep the size


class Overflow:
    """Room by slot. One thread of a process writes; several processes may, whose rooms are not each other's."""

    def __init__(self, fd: int, locked: Callable[[], AbstractContextManager[bool]]) -> None:
        """`locked` excludes the other processes, and says whether it does."""
        self._fd = fd
        self._locked = locked
        self._rooms: dict[int, Span] = {}

    def put(self, slot: int, record: bytes) -> int:
        """Write a slot's record and return its place in the file. Raises StoreError where memory does not suffice."""
        room = self._rooms.get(slot)
        if room is None or room.size_bytes < len(record):
            room = self._grow(slot, padded(len(record) + len(record) // 4))  # in steps, since records grow bit by bit
        view, done = memoryview(record), 0
        while done < len(record):
            done += os.pwrite(self._fd, view[done:], room.start_bytes + done)
        return room.start_bytes

    def _grow(self, slot: int, size_bytes: int) -> Span:
        free = allowance()
        what = f"commit record: it has outgrown its room and needs {format_bytes(size_bytes)} of memory"
        advice = "free memory, or put less into metadata= and what else is attached"
        if free is not None and size_bytes > free.free_bytes:
            raise StoreError(f"{what}, but {free.limit} leaves {format_bytes(free.free_bytes)}; {advice}")
        old = self._rooms.pop(slot, None)
        if old is not None:  # its end of the file stays, without memory
            call(LIBC.fallocate, self._fd, _PUNCH_HOLE, ctypes.c_int64(old.start_bytes), ctypes.c_int64(old.size_bytes))
        with self._locked() as held:
            if not held:
                raise StoreError(f"{what}, but another process of checkflow is stopped; continue or kill it")
            room = Span(padded(os.fstat(self._fd).st_size), size_bytes)
            try:
                os.posix_fallocate(self._fd, room.start_bytes, room.size_bytes)  # all of it or an error, never a SIGBUS
            except OSError as error:
                raise StoreError(f"{what}; the system refuses it ({error.strerror}); {advice}") from None
        self._rooms[slot] = room
        return room
