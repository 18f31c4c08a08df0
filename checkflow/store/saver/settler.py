"""What follows once a checkpoint is durable, beside the writing of the next one: it is read back, old ones removed.

Small checkpoints are settled several at once: reading back each of many a second would slow the training beside it,
and all but the newest would be removed right after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from checkflow.store.saver.persister import Written

GROUP_BYTES = 256 * 2**20  # what is settled at once; up to three times that is on the disk beside what is retained
GROUP_S = 1.0  # how long the first of them waits for others
BACKLOG = 1  # that many groups may wait for the one that is being settled


class Settler:
    """One thread that settles in order what it is given. What goes wrong in it is raised by the next call."""

    def __init__(self, settle: Callable[[Sequence[Written]], None]) -> None:
        self._settle = settle
        self._pool = ThreadPoolExecutor(1, "settle")
        self._pool.submit(lambda: None).result()  # its thread is there from now on, however many the machine has later
        self._pending: deque[Future[None]] = deque()
        self._group: list[Written] = []
        self._group_bytes = 0
        self._began_s = 0.0

    def add(self, written: Written) -> None:
        """Settle this after all others; waits while too many do."""
        if not self._group:
            self._began_s, self._group_bytes = time.monotonic(), 0
        self._group.append(written)
        self._group_bytes += written.manifest.size_bytes
        self.tend()
        while len(self._pending) > BACKLOG + 1:
            self._pending.popleft().result()

    def tend(self, *, now: bool = False) -> None:
        """Begin with those added last, once they are large together, the first has waited long enough, or `now`."""
        due = now or self._group_bytes >= GROUP_BYTES or time.monotonic() >= self._began_s + GROUP_S
        if self._group and due:
            group, self._group = tuple(self._group), []
            self._pending.append(self._pool.submit(self._settle, group))

    @property
    def busy(self) -> bool:
        """Whether anything is still to be settled."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        return bool(self._pending or self._group)

    def close(self) -> None:
        """Wait until all is settled and the thread has ended, whatever goes wrong in it."""
        self.tend(now=True)
        self._pool.shutdown()

    def wait(self) -> bool:
        """Until all is settled; False where all was."""
        waited = self.busy
        self.tend(now=True)
        while self._pending:
            self._pending.popleft().result()
        return waited
