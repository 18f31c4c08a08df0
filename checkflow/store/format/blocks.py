"""Reading a file's blocks, each checked against its hash before anybody sees it.

Blocks are read by a few threads, directly where the file system takes it, and hashed by the thread that read them
while the others read on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto

import xxhash

from checkflow.errors import CorruptStoreError
from checkflow.store.format.layout import ALIGN_BYTES, padded
from checkflow.store.format.manifest import BLOCK_BYTES, FileEntry
from checkflow.store.format.regular_file import is_scarcity, open_regular

THREADS = 3
PARALLEL_BYTES = 4 * BLOCK_BYTES  # below that threads cost more processor time than they save


class Way(Enum):
    """Where blocks are read from."""

    DEVICE = auto()  # what the page cache has would prove nothing about the disk
    DEVICE_TO_CACHE = auto()  # the page cache has it afterwards
    ANYWHERE = auto()  # what the page cache has, as long as it has it, then the device


def buffer_of(size_bytes: int) -> memoryview:
    """Fresh page-aligned memory, in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, max(1, padded(size_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def open_file(directory: int, name: str, *, direct: bool = False) -> int:
    """A descriptor of a file in an open directory. Raises CorruptStoreError, OSError where something is scarce."""
    try:
        return open_regular(name, os.O_RDONLY | (os.O_DIRECT if direct else 0), dir_fd=directory)
    except FileNotFoundError:
        raise CorruptStoreError(f"{name}: is missing") from None
    except OSError as error:
        if is_scarcity(error):
            raise
        if direct and error.errno == errno.EINVAL:
            return open_file(directory, name)
        raise CorruptStoreError(f"{name}: cannot be opened ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a file: its number, and its bytes once they verified."""

    entry: FileEntry
    number: int

    @property
    def start_bytes(self) -> int:
        return self.number * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        return min(BLOCK_BYTES, self.entry.size_bytes - self.start_bytes)


@dataclass(slots=True)
class _File:
    """A listed file, open; `cached` is a second descriptor, there as long as the page cache had all that was asked."""

    fd: int
    cached: int | None


def _open(directory: int, entry: FileEntry, way: Way, stack: contextlib.ExitStack) -> _File:
    """Descriptors of a listed file that has the listed size. Raises CorruptStoreError, OSError as `open_file`."""
    fd = open_file(directory, entry.name, direct=way is not Way.DEVICE_TO_CACHE)
    stack.callback(os.close, fd)
    size = os.fstat(fd).st_size
    if size != entry.size_bytes:
        raise CorruptStoreError(f"{entry.name}: has {size} bytes, not {entry.size_bytes}")
    if way is not Way.ANYWHERE:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # for where reads are not direct
        return _File(fd, None)
    try:
        cached = open_file(directory, entry.name)
    except (CorruptStoreError, OSError):  # too many are open
        return _File(fd, None)
    stack.callback(os.close, cached)
    return _File(fd, cached)


def read_files(
    directory: int,
    entries: Iterable[FileEntry],
    targets: Callable[[], Callable[[Block], memoryview] | None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
    way: Way = Way.DEVICE,
) -> None:
    """Read and verify files of an open directory.

    `targets` is called once every file is known to have its size, and tells for each block the memory to read it to:
    page-aligned, with room for the block padded to 4096. None only verifies. Raises CorruptStoreError that names the
    first file, and the byte, that is not what was written, and OSError where something is scarce.
    """
    with contextlib.ExitStack() as stack:
        work: list[tuple[Block, _File]] = []
        for entry in entries:
            file = _open(directory, entry, way, stack)
            work += [(Block(entry, number), file) for number in range(entry.block_count)]
        target = targets()

        def read(share: list[tuple[Block, _File]]) -> None:
            scratch = buffer_of(max((block.size_bytes for block, _ in share), default=0) if target is None else 0)
            for block, file in share:
                memory = scratch if target is None else target(block)
                cached = _cached(file, block, memory)
                try:
                    _read(file.fd, block, memory, cached)
                except CorruptStoreError:
                    if not cached:
                        raise
                    _read(file.fd, block, memory, 0)  # it may be the memory that is wrong
                progress()

        if sum(block.size_bytes for block, _ in work) < PARALLEL_BYTES:
            read(work)
            return
        threads = max(1, min(THREADS, len(work)))
        with ThreadPoolExecutor(threads, "read") as pool:
            try:
                reading = [pool.submit(read, work[thread::threads]) for thread in range(threads)]
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, str(error)) from None
            for done in reading:
                done.result()


def _cached(file: _File, block: Block, memory: memoryview) -> int:
    """How many bytes of the block the page cache gave, from its beginning; a multiple of 4096 or all."""
    fd = file.cached  # another block's reader may give it up meanwhile
    if fd is None:
        return 0
    try:
        got = os.preadv(fd, [memory[: block.size_bytes]], block.start_bytes, os.RWF_NOWAIT)
    except OSError:  # it has nothing of it, or the file system cannot tell
        got = 0
    if got == block.size_bytes:
        return got
    file.cached = None  # each question that it cannot answer makes the kernel read the block, which is read again below
    return got - got % ALIGN_BYTES


def _read(fd: int, block: Block, memory: memoryview, done: int) -> None:
    """The block from byte `done` on, and its hash."""
    name, size = block.entry.name, block.size_bytes
    while done < size:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)  # before the read: another block's reader may change them meanwhile
        try:
            got = os.preadv(fd, [memory[done : padded(size)]], block.start_bytes + done)
        except OSError as error:
            if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            if is_scarcity(error):
                raise
            raise CorruptStoreError(
                f"{name}: cannot be read at byte {block.start_bytes + done} ({error.strerror})"
            ) from None
        if got == 0:
            raise CorruptStoreError(f"{name}: ends at byte {block.start_bytes + done}, not at {block.entry.size_bytes}")
        done += got
    if xxhash.xxh3_128_hexdigest(memory[:size]) != block.entry.block_hash(block.number):
        raise CorruptStoreError(
            f"{name}: bytes {block.start_bytes} to {block.start_bytes + size} are not what was written"
        )
