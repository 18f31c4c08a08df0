"""Who hears of a signal when it comes, whatever the main thread does.

Python's handlers run once the main thread is back in the interpreter. From within a collective whose other side is gone
it never is. So a thread of its own hears of the signal, and keeps its deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

_STOP = 0  # no signal has this number
_CREDENTIALS = struct.Struct("3i")  # unix(7): process, user and group of who has written
_END_S = 1.0  # for the thread to end


class SignalListener:
    """Listens for one signal until closed; to be made and closed in the main thread.

    Python writes each signal's number into a descriptor that the process has one of. Where somebody else has it, as
    asyncio may, only what `tell` is called for is heard.

    Args:
        number: the signal.
        allowed_s: the time from the signal to the end of this process; None: the signal does not end it.
        end: ends it.
    """

    def __init__(self, number: int, allowed_s: Callable[[], float | None], end: Callable[[], None]) -> None:
        self.since: float | None = None  # when the first came that is to end the process
        self._number = number
        self._allowed_s = allowed_s
        self._end = end
        self._hears, self._tells = socket.socketpair()
        # A child that was just forked writes into it, too, when it is terminated.
        self._hears.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._tells.setblocking(False)
        others = signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)
        if others != -1:
            with contextlib.suppress(OSError, ValueError):  # it was closed, and is nobody's
                signal.set_wakeup_fd(others)
                os.write(others, self._hears.recv(1 << 10, socket.MSG_DONTWAIT))  # what came in between
        self._thread = threading.Thread(target=self._listen, name="checkflow-listener", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """The signal has come."""
        with contextlib.suppress(OSError):  # it is full: the thread is about to read
            self._tells.send(bytes([self._number]))

    def close(self) -> None:
        self._give_back()
        self._tells.setblocking(True)
        self._tells.send(bytes([_STOP]))
        self._thread.join(_END_S)
        self._close()

    def forked(self) -> None:
        """In a child, which has no such thread."""
        self._give_back()
        self._close()

    def _give_back(self) -> None:
        if (current := signal.set_wakeup_fd(-1)) not in (-1, self._tells.fileno()):
            with contextlib.suppress(OSError, ValueError):
                signal.set_wakeup_fd(current)  # somebody's who came later

    def _close(self) -> None:
        self._hears.close()
        self._tells.close()

    def _listen(self) -> None:
        while True:
            allowed_s = self._allowed_s()
            if allowed_s is None:
                self.since = None
            left_s = None if allowed_s is None or self.since is None else self.since + allowed_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                self._end()
                return
            self._hears.settimeout(left_s)
            try:
                heard = self._read()
            except TimeoutError:
                continue
            if heard == _STOP:
                return
            if heard == self._number and self.since is None:
                self.since = time.monotonic()

    def _read(self) -> int | None:
        """The number that this process has written; None: another one has."""
        data, ancillary, *_ = self._hears.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        writers = [_CREDENTIALS.unpack(found)[0] for _, kind, found in ancillary if kind == socket.SCM_CREDENTIALS]
        return data[0] if writers == [os.getpid()] else None
