"""Connections between machines on which nobody waits for good for what has begun: who is gone may not be heard to go.

Who listens, and who comes:

    listener = socket.create_server((host, 0))
    answer(listener, limit_s, talk)                     # talk(connection) in a thread of its own: anybody may come,
    prove(connection, key)                              # which therefore begins with this
    connection = connected(host, port, key, limit_s)    # elsewhere
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, TypeVar

from checkflow.store.both.stillness import LOOKS

QUIET_S = 30  # without a word, until the kernel asks whether the other machine is still there
SHORT_S = 0.05  # until who listens tries again, where there was no descriptor
T = TypeVar("T")


class Patient(Connection):
    """What has begun to come and does not, or is sent and not taken, for `limit_s` raises TimeoutError.

    It is waited for in parts: a process that was stopped meanwhile looks again.
    """

    def __init__(self, connected: socket.socket, limit_s: float) -> None:
        """Takes the socket."""
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
        # Else the kernel keeps what is little until more has come, or 40 ms have passed.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(connected.detach())
        self.wait_for(limit_s)

    def wait_for(self, limit_s: float) -> None:
        """From now on."""
        self.limit_s = limit_s
        seconds, rest_s = divmod(limit_s / LOOKS, 1)
        part = struct.pack("ll", int(seconds), 1 + int(rest_s * 1e6))
        with socket.socket(fileno=os.dup(self.fileno())) as same:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, part)

    def hang_up(self) -> None:
        """Whoever waits in another thread has an error at once. The descriptor stays its own until it closes it."""
        with socket.socket(fileno=os.dup(self.fileno())) as same, contextlib.suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)

    def _send(self, buf: Any) -> None:
        super()._send(buf, self._patiently(os.write))  # type: ignore[misc] # which calls it with the descriptor

    def _recv(self, size: int) -> Any:
        return super()._recv(size, self._patiently(os.read))  # type: ignore[misc]

    def _patiently(self, call: Callable[[int, Any], T]) -> Callable[[int, Any], T]:
        def patient(descriptor: int, what: Any) -> T:
            for _ in range(LOOKS):
                try:
                    return call(descriptor, what)
                except BlockingIOError:
                    pass
            raise TimeoutError(f"it does not answer within {self.limit_s:g} s")

        return patient


def connected(host: str, port: int, key: str, limit_s: float) -> Patient:
    """To who knows the key. Raises OSError, EOFError, AuthenticationError."""
    connection = Patient(socket.create_connection((host, port), limit_s), limit_s)
    try:
        answer_challenge(connection, key.encode())
        deliver_challenge(connection, key.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def accepted(listener: socket.socket, limit_s: float) -> Patient:
    """Whoever comes next, and may be anybody. Raises OSError."""
    return Patient(listener.accept()[0], limit_s)


def answer(listener: socket.socket, limit_s: float, then: Callable[[Patient], None]) -> None:
    """Wait for whoever comes next, and let `then` go on with it in a thread, so that nobody is kept waiting."""
    try:
        connection = accepted(listener, limit_s)
    except OSError:
        time.sleep(SHORT_S)  # no descriptor is left, or it has gone again
        return
    try:
        threading.Thread(target=then, args=(connection,), daemon=True).start()
    except RuntimeError:  # no thread is left: it hears that at once
        connection.close()


def prove(connection: Patient, key: str) -> None:
    """That who came knows the key, and we do. Raises OSError, EOFError, AuthenticationError."""
    deliver_challenge(connection, key.encode())
    answer_challenge(connection, key.encode())
