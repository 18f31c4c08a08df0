"""A thread that starts a saver the moment the last one ended: until then only the trainer has what is staged.

It alone starts savers and sees them end, so that it does both at once whatever the training does. What dead ones said
is left for whoever hears the living one.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from checkflow.errors import StoreError, internal
from checkflow.store.both.held import is_still
from checkflow.store.both.retry import Patience
from checkflow.store.both.words import WAKE
from checkflow.store.trainer.saver_process import SaverProcess

QUIET_DEATHS = 3  # in a row, with nothing made durable in between: of more a person is told
_LOOK = "look at what it says, at memory limits and at the disk"


@dataclass(frozen=True, slots=True)
class News:
    """A line for a person; `is_error` where a promise is broken."""

    line: str
    is_error: bool


class Keeper:
    """`saver` is the running one, None between two. A dead one is followed at once; later ones by patience."""

    def __init__(
        self,
        start: Callable[[], SaverProcess],
        durable: Callable[[], int],
        retry_s: float,
        tell: Callable[[News], None],
    ) -> None:
        """`durable` tells how far that is. Raises StoreError where no saver can be started now."""
        self._start = start
        self._durable = durable
        self._patience = Patience(retry_s)
        self._tell = tell
        self._in_a_row = 0
        self._was_durable = durable()
        self._failed = False
        self._ending = False
        self._owner = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wakes = os.fstat(self._wake)
        try:
            self.saver: SaverProcess | None = start()
        except BaseException:
            os.close(self._wake)
            raise
        self.dead: deque[SaverProcess] = deque()  # to be heard and closed
        self.deaths = 0
        self.starts = 1
        self._thread = threading.Thread(target=self._run, name="checkflow-keeper", daemon=True)
        self._thread.start()

    @property
    def is_hopeless(self) -> bool:
        """Whether none runs, and they have died for longer than it is tried, or nobody starts one any more."""
        tried = self._patience.exhausted and self._in_a_row > QUIET_DEATHS
        return self.saver is None and (tried or not self._thread.is_alive())

    def hurry(self) -> None:
        """Start the next one now."""
        self._patience.hurry()
        self._stir()

    def end(self) -> None:
        """Start no more. The running one is the caller's."""
        if os.getpid() == self._owner:  # a forked child has no such thread
            self._ending = True
            self._stir()
            if threading.current_thread() is not self._thread:  # whose turn it was to collect what nobody has any more
                while self._thread.is_alive():
                    self._thread.join(1.0)
                    self._stir()  # the system may have refused the one before
                self._close_wake()
        else:
            self._close_wake()

    def disown(self) -> None:
        """End, and close what is open to savers."""
        self.end()
        for saver in (self.saver, *self.dead):
            if saver is not None:
                saver.close()

    def _close_wake(self) -> None:
        if is_still(self._wake, self._wakes):
            os.close(self._wake)

    def _stir(self) -> None:
        if is_still(self._wake, self._wakes):
            with contextlib.suppress(OSError):  # so often unheard that it is awake anyway
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._keep_one()
        except Exception as error:  # noqa: BLE001 (nobody else would hear of it)
            line = f"a saver that ends is not followed by another any more: {internal(error)}"
            self._tell(News(line, is_error=True))

    def _keep_one(self) -> None:
        while not self._ending:
            saver = self.saver
            if saver is None:
                if self._patience.wait_s:
                    self._sleep(self._patience.wait_s)
                else:
                    self._begin()
                continue
            self._sleep(None, saver.pidfd)
            how = saver.ended()
            if how is not None:
                self.saver = None
                self.dead.append(saver)
                self._note_death(how)

    def _sleep(self, timeout_s: float | None, *more: int) -> None:
        poll = select.poll()
        for fd in (self._wake, *more):
            poll.register(fd, select.POLLIN)
        if any(fd == self._wake for fd, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)):
            with contextlib.suppress(OSError):  # then it is heard once more
                os.eventfd_read(self._wake)

    def _begin(self) -> None:
        try:
            self.saver = saver = self._start()
            self.starts += 1
            saver.tell(WAKE)  # who knows what the one before left
        except Exception as error:  # noqa: BLE001 (whatever it is, nobody else would start one)
            self._note_death(str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}")

    def _note_death(self, how: str) -> None:
        self.deaths += 1
        if self._durable() != self._was_durable:
            self._was_durable, self._in_a_row, self._failed = self._durable(), 0, False
            self._patience.succeeds()
        self._in_a_row += 1
        self._patience.fails()
        if self._in_a_row == 1:
            self._patience.hurry()
        if self._in_a_row <= QUIET_DEATHS:
            return
        what = f"the saver process died {self._in_a_row} times in a row (last: {how})"
        if self._patience.exhausted and not self._failed:
            self._failed = True
            self._tell(News(f"{what}; nothing is made durable; {_LOOK}", is_error=True))
        elif self._in_a_row == QUIET_DEATHS + 1:
            self._tell(News(f"{what}, and is started again; {_LOOK}", is_error=False))
