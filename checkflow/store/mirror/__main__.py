"""The mirror, started with exec by the trainer: no descriptor but four, its own session, no torch.

    python -m checkflow.store.mirror HOST SOCKET DIRECTORY LOCK TRAINER

It listens on the host's address, for the one rank that knows the key that the trainer says first, and tells the trainer
on which port. Where the trainer dies, or says nothing more, all that it holds is written down; where it says "close",
for every rank has ended, the last checkpoint alone, and the trainer is told what fails.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError

from checkflow.background import give_way
from checkflow.errors import StoreError, internal, reason
from checkflow.store.both.connections import Patient, answer, prove
from checkflow.store.both.lock import path_of
from checkflow.store.both.messages import FailedReport, Message, Notice
from checkflow.store.both.saver_log import write_log
from checkflow.store.both.words import CLOSE, IGNORED, MAX_LINE_BYTES
from checkflow.store.mirror.slots import MirroredSlots, greeted

PROOF_S = 30.0  # for whoever comes, to prove that it knows the key
LIMIT_S = 600.0  # for a rank to go on with what it has begun to say


class Mirror:
    """Holds the copy of the rank that came last; and of its slots before, until all ranks have a checkpoint in these.

    What those hold is on the rank's disk by then, which may be lost with it.
    """

    def __init__(self, listener: socket.socket, key: str) -> None:
        self._listener = listener
        self._key = key
        self._slots: list[MirroredSlots] = []  # the last ones are filled
        self._lock = threading.Lock()
        self._ended = False  # what there is is being written down

    def receive(self) -> None:
        """For as long as the process runs. Whoever comes, and says nothing, keeps nobody waiting."""
        while True:
            answer(self._listener, PROOF_S, self._receive)

    def _receive(self, connection: Patient) -> None:
        # It may come again, with other slots.
        with contextlib.suppress(OSError, EOFError, AuthenticationError, StoreError), connection:
            prove(connection, self._key)
            connection.wait_for(LIMIT_S)
            slots = greeted(connection)
            self._add(slots)
            while connection.poll(None):
                slots.receive(connection)
                if slots.agreed:
                    self._drop_before(slots)

    def _add(self, slots: MirroredSlots) -> None:
        with self._lock:
            if self._ended:
                raise ConnectionAbortedError("nothing more is received")
            self._slots.append(slots)

    def _drop_before(self, slots: MirroredSlots) -> None:
        with self._lock:
            if self._ended or slots not in self._slots:
                return
            place = self._slots.index(slots)
            before, self._slots = self._slots[:place], self._slots[place:]
        for former in before:
            former.close()

    def write_down(self, directory: int, hears: Callable[[str], bool] | None = None) -> None:
        """What there is, in the store's directory. `hears`: the trainer, for which the last checkpoint will do, since
        all ranks have it on their disks; False where it is gone. What it does not hear the next trainer there is told.
        """
        with self._lock:
            self._ended, held = True, self._slots
        store, failures = path_of(directory), list[str]()

        def fails(line: str) -> None:
            if hears is None or not hears(line):
                failures.append(line)

        def report(message: Message) -> None:
            if isinstance(message, FailedReport):
                fails(message.message)
            elif isinstance(message, Notice) and hears is not None:
                hears(message.message)

        for slots in held:
            try:
                slots.write_down(store, report, last_alone=hears is not None)
            except Exception as error:  # noqa: BLE001 (nobody else would hear of it, and others' are still to be written)
                why = reason(error) if isinstance(error, OSError) else internal(error)
                fails(f"{store}: the copies of rank {slots.rank} cannot be written ({why})")
        if failures:
            write_log(store, directory, failures)


def _hears(end: socket.socket, line: str) -> bool:
    """The trainer waits, and reads."""
    try:
        end.send(line.encode()[:MAX_LINE_BYTES])
    except OSError:
        return False
    return True


def main(arguments: list[str]) -> None:
    """Run until the trainer is gone, or says that it ends, and what is held is durable."""
    host, (end_fd, directory, _lock, trainer) = arguments[0], map(int, arguments[1:])
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    give_way()
    os.fchdir(directory)
    end = socket.socket(fileno=end_fd)
    key = end.recv(64).decode()
    with socket.create_server((host, 0)) as listener:
        end.send(str(listener.getsockname()[1]).encode())
        mirror = Mirror(listener, key)
        threading.Thread(target=mirror.receive, daemon=True).start()
        poll = select.poll()
        poll.register(trainer, select.POLLIN)
        poll.register(end, select.POLLIN)
        poll.poll()
        said = b""
        with contextlib.suppress(OSError):
            said = end.recv(64, socket.MSG_DONTWAIT)
        mirror.write_down(directory, partial(_hears, end) if said == CLOSE else None)
    sys.stdout.flush()
    os._exit(0)  # its thread waits for what nobody says


if __name__ == "__main__":
    main(sys.argv[1:])
