"""Taking the slots' memory from the kernel, slot by slot, beside the training: gigabytes of it take seconds.

A slot is used once all its pages are there, since a missing one would be a SIGBUS in the middle of training.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

MAX_THREADS = 8
PART_BYTES = 64 * 2**20  # less is not worth a thread
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 does not name it
_LIBC = ctypes.CDLL(None)  # mmap.madvise would hold the interpreter's lock


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a mapped file."""

    start_bytes: int
    size_bytes: int

    def parts(self, size_bytes: int) -> Iterator[Span]:
        for start in range(0, self.size_bytes, size_bytes):
            yield Span(self.start_bytes + start, min(size_bytes, self.size_bytes - start))


class Pages:
    """The pages of spans of a file mapped at an address, taken in this order.

    Little memory is taken at once, and refused by OSError; more of it by threads, half as many as there are cores, and
    its refusal is
    told by `take_refusal`.
    """

    def __init__(self, fd: int, address: int, spans: Sequence[Span] = ()) -> None:
        self._fd = fd
        self._address = address
        self._go = threading.Event()
        self._go.set()
        self._pool: ThreadPoolExecutor | None = None
        self.refused: OSError | None = None
        self._told = False
        self._left: dict[int, list[Future[None]]] = {}  # by span; of those that are not all there
        if sum(span.size_bytes for span in spans) <= PART_BYTES:
            for span in spans:
                self._take(span)
            return
        threads = min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
        self._pool = ThreadPoolExecutor(threads, "checkflow-pages")
        try:
            for number, span in enumerate(spans):
                self._left[number] = [self._pool.submit(self._take, part) for part in span.parts(PART_BYTES)]
        except RuntimeError as error:  # no thread to be had
            self.close()
            raise OSError(0, str(error)) from None

    def ready(self, number: int) -> bool:
        """Whether a span's pages are all there."""
        left = self._left.get(number, [])
        while left and left[0].done() and self._granted(left[0]):
            left.pop(0)
        if not left:
            self._left.pop(number, None)
        return not left

    def wait_for_more(self) -> bool:
        """Wait until one span more is there; False if none is to come."""
        if self.refused is not None or not self._left:
            return False
        number = min(self._left)
        wait(self._left[number])
        return self.ready(number)

    def take_refusal(self) -> str | None:
        """Why the slots that are not there will not come; said once."""
        if self.refused is None or self._told:
            return None
        self._told = True
        return f"slots: the system refuses their memory ({self.refused.strerror}); free some, or use slots=2"

    def _granted(self, part: Future[None]) -> bool:
        error = part.exception()
        if isinstance(error, OSError):
            self.refused = error
        elif error is not None:
            raise error
        return error is None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the memory to somebody who is in a hurry."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()

    def close(self) -> None:
        """No page is touched from now on."""
        self._go.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _take(self, part: Span) -> None:
        self._go.wait()
        # Maps and clears. Older kernels refuse, and map at the first copy; memory that is refused is refused below.
        _LIBC.madvise(
            ctypes.c_void_p(self._address + part.start_bytes), ctypes.c_size_t(part.size_bytes), _MADV_POPULATE_WRITE
        )
        os.posix_fallocate(
            self._fd, part.start_bytes, part.size_bytes
        )  # the guarantee; alone it would take small pages
