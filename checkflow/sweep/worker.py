"""The worker process: does the jobs that arrive on a socket, until whoever sends them is gone.

It leads a process group of its own, so that a solver's process that it started ends with it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from checkflow.background import remove_written
from checkflow.sweep.jobs import replies


def main(fd: int, folder: str) -> None:
    """Serve until killed, or until the other end of the socket is closed; `folder` is the sweep's own."""
    end = threading.Thread(target=_end_with_sender, args=(fd, folder), daemon=True)
    end.start()
    connection, frozen = Connection(fd), False
    try:
        while True:
            for reply in replies(connection.recv()):
                connection.send(reply)
            if not frozen:
                gc.collect()
                gc.freeze()  # each trace collects once, and need not look at all of torch again
                frozen = True
    except (EOFError, OSError):
        end.join()


def _end_with_sender(fd: int, folder: str) -> None:
    """However the sender ended, even killed: stop at once, with all that was started here."""
    hangup = select.poll()
    hangup.register(fd, select.POLLRDHUP)
    hangup.poll()
    remove_written(Path(folder))  # another worker may have done it already
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
