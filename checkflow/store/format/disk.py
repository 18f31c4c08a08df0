"""The only durable calls, and what each of them does not promise.

`LocalDisk` is the operating system. Tests put another Disk in its place, to record or fail each operation in turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from checkflow.store.format.layout import ALIGN_BYTES
from checkflow.store.libc import LIBC, call, raise_unless

DIRECT_BYTES = 2**20  # smaller files are written through the page cache
WRITE_BYTES = 16 * 2**20  # one write: large enough for full throughput, small enough to see that the disk moves
_PARALLEL = 2  # writes at a time: one is prepared and hashed while the disk has the other
_WRITE, _WRITE_AND_WAIT = 2, 1 | 2 | 4  # what sync_file_range is to do


class Disk(Protocol):
    """Operations on directories and files; each raises OSError."""

    def make_directory(self, path: Path) -> None:
        """Not durable before the parent's sync_directory."""

    def create(self, path: Path, *, direct: bool) -> int:
        """A new file's descriptor; `direct` where the file system's open allows it. Never opens one that exists."""

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Set the space aside and make the file this long, where the file system can; where not, do nothing.

        Without it direct writes that make a file longer wait for each other.
        """

    def set_buffered(self, fd: int) -> None:
        """Stop direct writes on a descriptor."""

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Bytes written, maybe fewer than given. Not durable before sync, and a failure may show only there."""

    def write_back(self, fd: int, *, wait: bool) -> None:
        """The device is being given what the page cache has, or has it all. Not durable; fails as sync does."""

    def sync(self, fd: int) -> None:
        """Data and size are on the device, as far as it tells the truth about its cache.

        After a failure nothing is known of the data, and a second call may wrongly succeed: give up the whole file.
        Does not make the file's name durable.
        """

    def close(self, fd: int) -> None:
        """Promises nothing."""

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file, where the file system has such. Not durable before sync_directory."""

    def rename(self, source: Path, target: Path) -> None:
        """Atomic for who looks now; after a power cut either name may be there until sync_directory."""

    def sync_directory(self, path: Path) -> None:
        """The directory's names are on the device; not those of its parent or of directories in it."""

    def unlink(self, path: Path) -> None:
        """May be undone by a power cut before sync_directory."""

    def remove_directory(self, path: Path) -> None:
        """Of an empty directory. May be undone by a power cut before the parent's sync_directory."""


class LocalDisk:
    """Disk, by the operating system."""

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path, *, direct: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                path.unlink(missing_ok=True)  # some kernels create the file before they refuse the flag
        return os.open(path, flags, 0o666)

    def allocate(self, fd: int, size_bytes: int) -> None:
        # not posix_fallocate: where the file system cannot, that writes into every block by itself
        if size_bytes:
            failed = call(LIBC.fallocate, fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
            raise_unless(not failed, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

    def set_buffered(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def write_back(self, fd: int, *, wait: bool) -> None:
        how = _WRITE_AND_WAIT if wait else _WRITE
        failed = call(LIBC.sync_file_range, fd, ctypes.c_int64(0), ctypes.c_int64(0), how)
        raise_unless(not failed, errno.ENOSYS)  # any other may be the file's own, which sync will not tell again

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()


class NewFiles:
    """Files that are written one after the other and synced together, closed at the end of a `with`.

    Together, because a file system then writes what they share, their directory's block and their inodes', once: if
    the device has all that is in them before.
    """

    def __init__(self, disk: Disk, progress: Callable[[], None] = lambda: None) -> None:
        self._disk = disk
        self._progress = progress
        self._open = contextlib.ExitStack()
        self._files: list[int] = []

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def write(
        self,
        path: Path,
        pieces: Iterable[memoryview],
        size_bytes: int,
        digest: Callable[[memoryview], str] = lambda _: "",
    ) -> str:
        """Make a file of `size_bytes` from pieces and return the pieces' digests one after the other.

        Pieces begin at page-aligned addresses and, all but the last, are multiples of 4096 long; what the last has
        beyond the file is left out. Raises OSError.
        """
        direct = size_bytes >= DIRECT_BYTES
        fd = self._disk.create(path, direct=direct)
        self._open.callback(self._disk.close, fd)
        self._files.append(fd)
        stream = _Stream(self._disk, fd, self._progress, direct)
        if direct:
            self._disk.allocate(fd, size_bytes)
        digests: list[str] = []
        offset = 0
        if size_bytes <= WRITE_BYTES:
            for piece in pieces:
                digests.append(stream.write(piece[: max(0, size_bytes - offset)], offset, digest))
                offset += len(piece)
        else:
            with ThreadPoolExecutor(_PARALLEL, "write") as pool:
                writing: deque[Future[str]] = deque()
                for piece in pieces:
                    writing.append(pool.submit(stream.write, piece[: max(0, size_bytes - offset)], offset, digest))
                    offset += len(piece)
                    if len(writing) == _PARALLEL:
                        digests.append(writing.popleft().result())
                digests += [future.result() for future in writing]
        stream.finish()
        if offset < size_bytes:
            raise OSError(errno.EIO, f"{offset} bytes were given for a file of {size_bytes}", str(path))
        return "".join(digests)

    def sync(self) -> None:
        """All are on the device, synced in the order they were written in; their names are not. Raises OSError."""
        steps = (partial(self._disk.write_back, wait=False), partial(self._disk.write_back, wait=True), self._disk.sync)
        for step in steps:
            for fd in self._files:
                step(fd)
                self._progress()


@dataclass(slots=True)
class _Stream:
    """Writes pieces, `direct` until the file system refuses."""

    disk: Disk
    fd: int
    progress: Callable[[], None]
    direct: bool
    _tail: tuple[memoryview, int] | None = None  # less than 4096 bytes that no direct write takes, and their offset

    def write(self, piece: memoryview, offset: int, digest: Callable[[memoryview], str]) -> str:
        found = digest(piece)
        self._put(piece, offset)
        return found

    def finish(self) -> None:
        """Write what is left, once every other piece is written: this ends direct writes."""
        if self._tail is not None:
            self._buffered()
            self._put(*self._tail)

    def _put(self, piece: memoryview, offset: int) -> None:
        done = 0
        while done < len(piece):
            direct = self.direct  # another piece's write may find out meanwhile
            left = piece[done:]
            if direct and len(left) < ALIGN_BYTES:
                self._tail = left, offset + done
                return
            try:
                wrote = self.disk.write(
                    self.fd, left[: len(left) - len(left) % ALIGN_BYTES] if direct else left, offset + done
                )
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._buffered()  # only the write tells whether the file system takes direct ones
                continue
            if wrote == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            if direct and wrote % ALIGN_BYTES:
                self._buffered()  # a write cut short left an offset that direct writes refuse
            done += wrote
            self.progress()

    def _buffered(self) -> None:
        self.disk.set_buffered(self.fd)
        self.direct = False


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a checkpoint's directory, which holds files only, or what has its name; of a link only the link goes.

    A folder that somebody put into it stays, and all else goes. Raises OSError, the first one, at the end.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        disk.unlink(path)
        return
    failed: OSError | None = None
    for entry in sorted(path.iterdir()):
        try:
            disk.unlink(entry)
        except OSError as error:
            failed = failed or error  # the others still make room
    if failed is not None:
        raise failed
    disk.remove_directory(path)
