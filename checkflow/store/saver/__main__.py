"""The saver process, started with exec by the trainer: no descriptor but five, its own session, no torch.

    python -m checkflow.store.saver MEMORY SOCKET DIRECTORY LOCK TRAINER

Each argument is an inherited descriptor: the slots' memfd, the socket, the store's directory and its lock, which are
held by being open, the trainer's pidfd.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from checkflow.background import give_way
from checkflow.store.both.config import IGNORED
from checkflow.store.format.disk import LocalDisk
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.saver.loop import Saver


def main(arguments: list[str]) -> None:
    """Run until the trainer is gone and the newest staged checkpoint is durable."""
    memory, end, directory, lock, trainer = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)  # a signal to the trainer's whole group must not cost its last state
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    give_way()
    os.fchdir(directory)  # what was locked is what is written, wherever its path leads by now
    shared, here = SharedMemory.attach(memory), Path()
    saver = Saver(shared, LocalDisk(), socket.socket(fileno=end), trainer, here, directory, lock)
    try:
        saver.run()
    except Exception as error:
        saver.fail(f"the saver ended on an internal error, please report it ({type(error).__name__}: {error})")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
