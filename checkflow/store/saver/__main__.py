"""The saver process, started with exec by the trainer: no descriptor but five, its own session, no torch.

    python -m checkflow.store.saver MEMORY SOCKET DIRECTORY LOCK TRAINER

Each argument is an inherited descriptor: the slots' memfd, the socket, the store's directory and its lock, which are
held by being open, the trainer's pidfd.

Until there is work it imports nothing but this: slots whose size was a first guess at the state's are never filled, and
a training that only restores fills none.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from checkflow.store.both.words import CLOSE, IGNORED, LAST, MAX_WORD_BYTES


def main(arguments: list[str]) -> None:
    """Run until the trainer is gone and the newest staged checkpoint is durable."""
    memory, end, directory, lock, trainer = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)  # a signal to the trainer's whole group must not cost its last state
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    heard = heard_before_work(end, trainer)
    if heard is not None:
        from checkflow.collector import lasting_imports, process_ends

        with lasting_imports():
            from checkflow.store.saver.loop import work

        work(memory, end, directory, lock, trainer, heard)
        process_ends()


def heard_before_work(end: int, trainer: int) -> list[bytes] | None:
    """The trainer's words until there may be work; None where it closes, and there was none.

    The trainer says a word before it fills its first slot. Where it ended, and said none, whoever looks at the slots
    finds that out.
    """
    heard: list[bytes] = []
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(trainer, select.POLLIN)
    while not heard or heard[-1] == LAST:
        if all(fd == trainer for fd, _ in poll.poll()):
            break
        try:
            heard.append(os.read(end, MAX_WORD_BYTES))
        except ConnectionResetError:
            break
        if heard[-1] == CLOSE:
            return None
    return heard


if __name__ == "__main__":
    main(sys.argv[1:])
