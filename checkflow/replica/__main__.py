"""The process that brings the replica on, started with exec by the trainer, which it outlives.

    python -m checkflow.replica MEMORY SOCKET LOCK

Each argument is an inherited descriptor: the slots' memfd, the socket, and what is locked for as long as it runs. It
ends once the trainer has gone and nothing that was staged is left to do.
"""

from __future__ import annotations

import signal
import socket
import sys

from checkflow.collector import lasting_imports, process_ends
from checkflow.store.both.words import IGNORED


def main(arguments: list[str]) -> None:
    """Until the trainer is gone, and all that it has staged is in a whole slot."""
    memory, end, _lock = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)  # a signal to the trainer's whole group must not cost its last state
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    with lasting_imports():
        from checkflow.replica.loop import run
        from checkflow.store.memory.shared_memory import SharedMemory

    run(SharedMemory.attach(memory), socket.socket(fileno=end))


if __name__ == "__main__":
    main(sys.argv[1:])
    process_ends()
