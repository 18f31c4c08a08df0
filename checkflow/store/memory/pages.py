"""Taking the slots' memory from the kernel, slot by slot, beside the training: gigabytes of it take seconds.

A slot is used once all its pages are there, since a missing one would be a SIGBUS in the middle of training.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkflow.store.memory.mapping import HUGE_BYTES, MADV_COLLAPSE, MADV_POPULATE_WRITE, address_of, advise

MAX_THREADS = 8
PART_BYTES = 64 * 2**20  # less is not worth a thread


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a mapped file."""

    start_bytes: int
    size_bytes: int

    def parts(self, size_bytes: int) -> Iterator[Span]:
        for start in range(0, self.size_bytes, size_bytes):
            yield Span(self.start_bytes + start, min(size_bytes, self.size_bytes - start))


class Pages:
    """The pages of spans of a file, taken in this order. `memory` maps all of the file, at a multiple of 2 MiB.

    Little memory is taken at once, and refused by OSError; more of it by threads, half as many as there are cores, and
    its refusal is told by `take_refusal`. They keep the mapping, and are daemons: a program that ends without `close`
    waits for none.
    """

    def __init__(self, fd: int, memory: memoryview, spans: Sequence[Span] = ()) -> None:
        self._fd = fd
        self._memory = memory[:]
        self._address, self._end = address_of(memory), len(memory)
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._paused = self._closing = False
        self._parts = deque((number, part) for number, span in enumerate(spans) for part in span.parts(PART_BYTES))
        self._missing = {
            number: -(-span.size_bytes // PART_BYTES) for number, span in enumerate(spans)
        }  # parts, by span
        self._refusals: dict[int, OSError] = {}  # by span
        self._told = False
        self._threads: list[threading.Thread] = []
        if sum(span.size_bytes for span in spans) <= PART_BYTES:
            for number, part in self._parts:
                self._take(part)
                self._missing[number] -= 1
            return
        for number in range(min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))):
            thread = threading.Thread(target=self._run, name=f"checkflow-pages-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more to be had
                break
            self._threads.append(thread)
        if not self._threads:
            self._run()

    @property
    def refused(self) -> int:
        """How many spans will never have their pages."""
        return len(self._refusals)

    def ready(self, number: int) -> bool:
        """Whether a span's pages are all there."""
        return self._missing.get(number, 0) == 0

    def wait_for_more(self) -> bool:
        """Wait until one span more is there, and return whether it came; False if none is to come."""
        with self._changed:
            coming = [number for number, parts in self._missing.items() if parts and number not in self._refusals]
            if not coming or self._closing:
                return False
            first = min(coming)
            self._changed.wait_for(lambda: self.ready(first) or first in self._refusals or self._closing)
        return self.ready(first) or self.wait_for_more()

    def take_refusal(self) -> str | None:
        """Why the slots that are not there will not come; said once."""
        if not self._refusals or self._told:
            return None
        self._told = True
        had, error = len(self._missing) - self.refused, next(iter(self._refusals.values()))
        what = f"slots: the system refuses the memory of {self.refused} of {len(self._missing)} ({error.strerror})"
        if had < 2:
            advice = "use slots=1, free memory" if had else "free memory"
            return f"{what}, and with {had} nothing more is checkpointed; {advice}, or train on a machine with more"
        return f"{what}; training goes on with {had}: use slots={had}, or free memory"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the memory to somebody who is in a hurry."""
        self._paused = True
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """No page is touched from now on. In a forked child, which has no such threads, nothing is waited for."""
        if os.getpid() == self._owner:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            for thread in self._threads:
                if thread is not threading.current_thread():  # where a handle that nobody has is collected in it
                    thread.join()
        self._memory.release()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused or self._closing)
                if self._closing or not self._parts:
                    return
                number, part = self._parts.popleft()
            refusal = None
            if number not in self._refusals:
                try:
                    self._take(part)
                except OSError as error:
                    refusal = error
            with self._changed:
                if refusal is not None:
                    self._refusals.setdefault(number, refusal)
                elif number not in self._refusals:
                    self._missing[number] -= 1
                self._changed.notify_all()

    def _take(self, part: Span) -> None:
        self._make_huge(part)
        # Maps and clears. Older kernels refuse, and map at the first copy; memory that is refused is refused below.
        advise(self._address + part.start_bytes, part.size_bytes, MADV_POPULATE_WRITE)
        os.posix_fallocate(
            self._fd, part.start_bytes, part.size_bytes
        )  # the guarantee; alone it would take small pages

    def _make_huge(self, part: Span) -> None:
        """As far as the kernel can. It must be told when: by default it gives shared memory none."""
        first = part.start_bytes // HUGE_BYTES * HUGE_BYTES
        end = min(part.start_bytes + part.size_bytes + HUGE_BYTES - 1, self._end) // HUGE_BYTES * HUGE_BYTES
        starts = range(first, end, HUGE_BYTES)
        for start in starts:
            advise(self._address + start, mmap.PAGESIZE, MADV_POPULATE_WRITE)  # one that is empty would be refused
        if starts and not advise(self._address + first, end - first, MADV_COLLAPSE):
            for start in starts:  # one that could not be had may have kept the kernel from the rest
                advise(self._address + start, HUGE_BYTES, MADV_COLLAPSE)
