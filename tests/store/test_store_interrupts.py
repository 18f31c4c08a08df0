"""Ctrl-C at any moment, in a process that goes on: no saver, no lock and no memory is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from interrupting import assert_nothing_is_left, interrupted_at, others, plain_saver
from small_store import SMALL, newest_whole, silent, stage, stop

from checkflow.store.both.lock import StoreLock
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # as it should

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"

__all__ = ["others"]  # a fixture of every test here


def test_an_interrupt_at_any_line_of_open_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the package that opening and closing run."""
    store = tmp_path / "store"
    monkeypatch.setattr(sys, "executable", str(plain_saver(tmp_path)))
    with interrupted_at(0) as lines, StoreHandle.open(store, [SMALL], notify=silent):
        pass
    every = range(1, lines[0] + 1)
    for line in every if NIGHTLY else sorted(random.Random(0).sample(every, 60)):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(line):
            StoreHandle.open(store, [SMALL], notify=silent).close(1.0)
        assert_nothing_is_left(store)


def test_a_handle_that_is_lost_is_let_go(tmp_path: Path) -> None:
    """As where an interrupt came before anybody had it."""
    handle = StoreHandle.open(tmp_path, [SMALL], notify=silent)
    assert stage(handle, SMALL, 1)
    del handle
    assert_nothing_is_left(tmp_path)
    assert newest_whole(tmp_path) == 1


def test_two_interrupts_and_the_store_can_be_opened_again(tmp_path: Path) -> None:
    """As in a notebook: one ends the loop, one the wait for the disk. What was staged is persisted all the same."""
    each = PersistEvery(iterations=1)
    with (
        pytest.raises(KeyboardInterrupt),
        StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=each) as handle,
    ):
        saver = stop(handle)
        assert stage(handle, SMALL, 1)

        def interrupt() -> None:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        raise KeyboardInterrupt
    thread.join()
    os.kill(saver, signal.SIGCONT)
    StoreLock.acquire(tmp_path, silent, timeout_s=20).close()
    assert newest_whole(tmp_path) == 1
    assert_nothing_is_left(tmp_path)
