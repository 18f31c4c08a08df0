"""The thread that settles durable checkpoints beside the next one's writing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_store import InProcess, until

from checkflow.store.saver import settler as settler_module
from checkflow.store.saver.persister import Written
from checkflow.store.saver.settler import BACKLOG, Settler


def written(tmp_path: Path) -> Written:
    saver = InProcess(tmp_path / "store")
    made = saver.persister.write(saver.take(1))
    saver.close()
    assert made is not None
    return made


def test_order_and_backlog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, first come first served; whoever adds too many waits."""
    go, seen, added = threading.Semaphore(0), list[Written](), list[Written]()
    one = written(tmp_path)
    monkeypatch.setattr(settler_module, "GROUP_BYTES", one.manifest.size_bytes)  # each by itself

    def settle(group: Sequence[Written]) -> None:
        go.acquire()
        seen.extend(group)

    settler = Settler(settle)
    items = [Written(one.taken, one.manifest) for _ in range(BACKLOG + 3)]

    def add() -> None:
        for item in items:
            settler.add(item)
            added.append(item)

    adding = threading.Thread(target=add)
    adding.start()
    until(lambda: len(added) >= BACKLOG + 1, "the backlog is full")
    assert settler.busy
    assert not seen
    go.release(len(items))
    adding.join()
    settler.wait()
    assert [id(item) for item in seen] == [id(item) for item in items]
    assert not settler.busy
    assert not settler.wait()


def test_small_ones_are_settled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are large enough, the first has waited long enough, or somebody waits for them."""
    seen: list[Sequence[Written]] = []
    now = [100.0]
    one = written(tmp_path)
    monkeypatch.setattr(settler_module, "GROUP_BYTES", 3 * one.manifest.size_bytes)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def groups() -> list[int]:
        settler._pool.submit(int).result()  # after all that was begun
        return [len(group) for group in seen]

    settler = Settler(seen.append)
    for _ in range(4):
        settler.add(one)
    assert groups() == [3]
    now[0] += settler_module.GROUP_S / 2
    settler.add(one)
    settler.tend()
    assert groups() == [3]
    assert settler.busy
    now[0] += settler_module.GROUP_S / 2
    settler.tend()
    assert groups() == [3, 2]
    assert not settler.busy
    settler.add(one)
    assert settler.wait()
    assert groups() == [3, 2, 1]
    settler.add(one)
    settler.close()
    assert [len(group) for group in seen] == [3, 2, 1, 1]


def test_what_goes_wrong_is_raised_by_the_next_call(tmp_path: Path) -> None:
    """A bug in the thread ends the saver as one in its main thread would."""

    def settle(_: Sequence[Written]) -> None:
        raise ZeroDivisionError

    settler = Settler(settle)
    settler.add(written(tmp_path))
    with pytest.raises(ZeroDivisionError):
        settler.wait()


def test_its_thread_is_there_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has none to spare later on keeps nothing from being settled."""
    seen: list[Sequence[Written]] = []
    settler = Settler(seen.append)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    settler.add(written(tmp_path))
    assert settler.wait() and len(seen) == 1
    settler.close()
    with pytest.raises(RuntimeError):  # which ends the saver, and the next one is tried later
        Settler(seen.append)
