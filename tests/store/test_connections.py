"""Nobody waits for good for another machine that does not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError

import pytest

from checkflow.store.both.connections import Patient, accepted, answer, connected, prove


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("localhost", 0)) as made:
        yield made


def of(listener: socket.socket, limit_s: float, key: str = "key") -> Patient:
    return connected("localhost", listener.getsockname()[1], key, limit_s)


def answering(listener: socket.socket, key: str = "key") -> list[Patient]:
    """Whoever comes, once it has proved that it knows the key."""
    came: list[Patient] = []

    def serve() -> None:
        connection = accepted(listener, 60.0)
        try:
            prove(connection, key)
        except AuthenticationError:
            connection.close()
            return
        came.append(connection)

    threading.Thread(target=serve, daemon=True).start()
    return came


def test_both_hear_each_other_as_long_as_that_takes(listener: socket.socket) -> None:
    """`limit_s` is between two bytes: a message may take longer, and who says nothing is not waited for."""
    came = answering(listener)
    with of(listener, 2.0) as ours:
        while not came:
            time.sleep(0.001)
        theirs = came.pop()
        large = bytes(range(256)) * 40_000
        raw = socket.socket(fileno=theirs.fileno())
        raw.sendall(len(large).to_bytes(4, "big") + large[:1000])

        def rest() -> None:
            for start in range(1000, len(large), 2_500_000):
                time.sleep(0.6)
                raw.sendall(large[start : start + 2_500_000])

        thread = threading.Thread(target=rest)
        thread.start()
        assert ours.recv_bytes() == large
        thread.join()
        raw.detach()
        ours.send_bytes(b"said")
        assert theirs.recv_bytes() == b"said"
        assert not ours.poll(0.01)
        theirs.close()


@pytest.mark.parametrize("what", ["proves", "answers", "takes"])
def test_who_does_not_is_given_up(listener: socket.socket, what: str) -> None:
    """The kernel accepts for a process that is stopped, and takes what fits into its buffers."""
    if what == "proves":
        with pytest.raises(TimeoutError, match=r"it does not answer within 0\.2 s"):
            of(listener, 0.2)
        return
    came = answering(listener)
    with of(listener, 0.2) as ours, pytest.raises(TimeoutError, match=r"it does not answer within 0\.2 s"):
        if what == "answers":
            ours.recv_bytes()
        for _ in range(100):
            ours.send_bytes(bytes(10**6))
    for each in came:
        each.close()


def test_nor_is_who_does_not_know_the_key_waited_for(listener: socket.socket) -> None:
    answering(listener, "another")
    with pytest.raises(AuthenticationError):
        of(listener, 60.0)


def test_whoever_finds_no_thread_hears_it_at_once(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_connection(("localhost", listener.getsockname()[1])) as comes:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            answer(listener, 60.0, lambda _: None)
        comes.settimeout(30.0)
        assert comes.recv(1) == b""
