"""What follows once a checkpoint is durable, beside the writing of the next one: it is read back, old ones removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from checkflow.store.persist import Written

BACKLOG = 1  # that many durable checkpoints may wait: each is one more on the disk than is retained


class Settler:
    """One thread that settles in order what it is given. What goes wrong in it is raised by the next call."""

    def __init__(self, settle: Callable[[Written], None]) -> None:
        self._settle = settle
        self._pool = ThreadPoolExecutor(1, "settle")
        self._pending: deque[Future[None]] = deque()

    def add(self, written: Written) -> None:
        """Settle this after all others; waits while too many do."""
        self._pending.append(self._pool.submit(self._settle, written))
        while len(self._pending) > BACKLOG + 1:
            self._pending.popleft().result()

    @property
    def busy(self) -> bool:
        """Whether anything is still to be settled."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        return bool(self._pending)

    def close(self) -> None:
        """Wait until all is settled and the thread has ended, whatever goes wrong in it."""
        self._pool.shutdown()

    def wait(self) -> bool:
        """Until all is settled; False where all was."""
        waited = self.busy
        while self._pending:
            self._pending.popleft().result()
        return waited
