"""The thread that settles durable checkpoints beside the next one's writing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from small_store import InProcess, until

from checkflow.store.persist import Written
from checkflow.store.settler import BACKLOG, Settler


def written(tmp_path: Path) -> Written:
    saver = InProcess(tmp_path / "store")
    made = saver.persister.write(saver.take(1))
    saver.close()
    assert made is not None
    return made


def test_order_and_backlog(tmp_path: Path) -> None:
    """One at a time, first come first served; whoever adds too many waits."""
    go, seen, added = threading.Semaphore(0), [], []
    one = written(tmp_path)

    def settle(item: Written) -> None:
        go.acquire()
        seen.append(item)

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


def test_what_goes_wrong_is_raised_by_the_next_call(tmp_path: Path) -> None:
    """A bug in the thread ends the saver as one in its main thread would."""

    def settle(_: Written) -> None:
        raise ZeroDivisionError

    settler = Settler(settle)
    settler.add(written(tmp_path))
    with pytest.raises(ZeroDivisionError):
        settler.wait()
