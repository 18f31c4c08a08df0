"""The saver's loop in this process, its trainer another that can be ended: what no test from outside can time."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_store import InProcess, newest_whole, until

from checkflow.store.both.lock import LOCK
from checkflow.store.both.messages import DurableReport, FailedReport, Message, Notice, receive
from checkflow.store.both.saver_log import take_log
from checkflow.store.both.words import CLOSE
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.writer import INCOMPLETE
from checkflow.store.saver import loop as loop_module
from checkflow.store.saver import persister as persister_module
from checkflow.store.saver import settler as settler_module
from checkflow.store.saver.loop import Saver
from checkflow.store.saver.persister import Persister


class Watched:
    """A saver, the trainer's end of its socket, and a process that stands for the trainer."""

    def __init__(self, store: Path) -> None:
        self.one = InProcess(store)
        self._trainer = subprocess.Popen(["sleep", "600"])
        self._pidfd = os.pidfd_open(self._trainer.pid)
        self.end, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._directory, self._lock = os.open(store, os.O_RDONLY), os.open(store / LOCK, os.O_CREAT | os.O_RDWR)
        self.saver = Saver(
            self.one.shared, LocalDisk(), self._theirs, self._pidfd, store, self._directory, self._lock
        )  # fmt: skip

    def heard(self) -> list[Message]:
        """What it said since."""
        said = []
        while select.select([self.end], [], [], 0)[0]:
            message = receive(self.end)
            assert message is not None
            said.append(message)
        return said

    def kill_trainer(self) -> None:
        self._trainer.kill()
        self._trainer.wait()

    def close(self) -> None:
        self.kill_trainer()
        self.end.close()
        self._theirs.close()
        for fd in (self._pidfd, self._directory, self._lock):
            os.close(fd)
        self.one.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path / "store")
    yield one
    one.close()


def _before(name: str, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the saver's settling of a group, or its look for work, do something first."""
    owner: object = Persister if name == "settle" else loop_module
    done: Callable[..., object] = getattr(owner, name)

    def first(*given: object, **named: object) -> object:
        do()
        return done(*given, **named)

    monkeypatch.setattr(owner, name, first)


def test_a_saver_alone_waits_for_what_is_settled(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead trainer is news at each look; looking again and again would take a processor from the next training."""
    looks: list[None] = []
    _before("settle", lambda: threading.Event().wait(0.3), monkeypatch)
    _before("take_due", lambda: looks.append(None), monkeypatch)
    watched.one.stage(1)
    watched.kill_trainer()
    watched.saver.run()
    assert newest_whole(watched.one.store) == 1
    assert 1 < len(looks) < 20


def test_what_a_dying_trainer_did_not_hear_is_told_to_the_next(watched: Watched) -> None:
    """Said while it lived, and never read."""
    store = watched.one.store
    away = store.rename(store.parent / "away")
    watched.one.stage(1)
    running = threading.Thread(target=watched.saver.run)
    running.start()
    until(lambda: bool(select.select([watched.end], [], [], 0)[0]), "it said something")
    until(lambda: not watched.one.slots.pending, "it was tried")
    away.rename(store)
    watched.kill_trainer()
    running.join()
    lines = take_log(store, watched._directory)
    assert any("iteration 1 cannot be made durable" in line for line in lines)
    assert not take_log(store, watched._directory)


def test_what_a_trainer_that_closed_has_heard_is_not_told_again(watched: Watched) -> None:
    store = watched.one.store
    away = store.rename(store.parent / "away")
    watched.one.stage(1)
    watched.end.send(CLOSE)
    watched.saver.run()
    away.rename(store)
    said = watched.heard()
    assert [type(message) for message in said] == [Notice, Notice, FailedReport]  # it is away, and what fails of that
    assert not take_log(store, watched._directory)


def test_a_saver_that_fails_ends_what_it_settles_first(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word comes when nothing of it is at work in the store any more."""
    order: list[str] = []
    entered = threading.Event()

    def settle() -> None:
        entered.set()
        threading.Event().wait(0.2)
        order.append("settled")

    def look() -> None:
        if entered.is_set():
            raise ZeroDivisionError

    monkeypatch.setattr(settler_module, "GROUP_BYTES", 1)
    _before("settle", settle, monkeypatch)
    _before("take_due", look, monkeypatch)
    watched.one.stage(1)
    with pytest.raises(ZeroDivisionError):
        watched.saver.run()
    watched.saver.fail("a bug")
    order.append("said")
    assert order == ["settled", "said"]
    said = watched.heard()
    assert isinstance(said[0], DurableReport) and said[-1] == FailedReport(sequence=0, message="a bug")


def test_leftovers_that_stay_are_told_with_what_to_do(tmp_path: Path) -> None:
    """In words, without the number of the system's error."""
    (tmp_path / f"{INCOMPLETE}a" / "folder").mkdir(parents=True)
    watched = Watched(tmp_path)
    watched.end.send(CLOSE)
    watched.saver.run()
    (notice,) = watched.heard()
    assert isinstance(notice, Notice)
    start = f"{tmp_path}: leftovers cannot be removed (Is a directory: "
    assert notice.message.startswith(start) and "Errno" not in notice.message
    assert "); remove that folder; " in notice.message
    watched.close()


def test_a_bug_that_one_checkpoint_meets_is_an_error_at_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the end of one saver after the other, each of which tries the same; the next checkpoint is a new chance."""

    def fails(_: Path) -> int:
        raise TypeError("not foreseen")

    with monkeypatch.context() as patched:
        patched.setattr(persister_module, "next_serial", fails)
        watched.one.stage(1)
        watched.end.send(CLOSE)
        watched.saver.run()
    (said,) = watched.heard()
    what = f"{watched.one.store}: the checkpoint of iteration 1 cannot be made durable"
    why = "internal error, please report it (TypeError: not foreseen)"
    assert said == FailedReport(sequence=1, message=f"{what} ({why})")
    watched.one.stage(2)
    watched.saver.run()
    assert newest_whole(watched.one.store) == 2


def test_a_bug_without_a_trainer_is_told_to_the_next(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> int:
        raise TypeError("not foreseen")

    monkeypatch.setattr(persister_module, "next_serial", fails)
    watched.one.stage(1)
    watched.kill_trainer()
    watched.saver.run()
    (line,) = take_log(watched.one.store, watched._directory)
    assert "iteration 1 cannot be made durable (internal error" in line and "TypeError: not foreseen" in line


def test_a_bug_in_what_follows_ends_no_saver(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is durable by then."""

    def fails(*_: object, **__: object) -> None:
        raise TypeError("not foreseen")

    monkeypatch.setattr(persister_module, "verify_written", fails)
    watched.one.stage(1)
    watched.end.send(CLOSE)
    watched.saver.run()
    durable, said = watched.heard()
    assert isinstance(durable, DurableReport) and isinstance(said, FailedReport) and said.sequence == 1
    assert "is durable, but was not read back" in said.message and "TypeError: not foreseen" in said.message
    assert newest_whole(watched.one.store) == 1


@pytest.mark.parametrize(("kind", "why"), [(MemoryError, ""), (RuntimeError, "can't start new thread")])
def test_what_the_machine_lacks_is_no_bug(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], why: str
) -> None:
    def fails(_: Path) -> int:
        raise kind(why)

    monkeypatch.setattr(persister_module, "next_serial", fails)
    watched.one.stage(1)
    watched.end.send(CLOSE)
    watched.saver.run()
    (said,) = watched.heard()
    assert isinstance(said, FailedReport) and "internal error" not in said.message
    assert "free memory" in said.message or "allow more processes and threads" in said.message
