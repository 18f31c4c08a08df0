"""A saver that has nothing to do yet: it has imported next to nothing, and misses no word."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from small_store import SMALL, is_whole, saver_of, silent, stage, until

import checkflow
from checkflow.store.both.words import CLOSE, LAST, NOW, WAKE
from checkflow.store.format.reader import load_newest
from checkflow.store.saver.__main__ import heard_before_work
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

EACH = PersistEvery(iterations=1)


def has_imported(saver: int) -> bool:
    return "pydantic" in Path(f"/proc/{saver}/maps").read_text()


def test_until_a_slot_is_filled_a_saver_imports_nothing(tmp_path: Path) -> None:
    """And does its work then."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=EACH) as handle:
        saver = saver_of(handle)
        until(lambda: "checkflow.store.saver" in Path(f"/proc/{saver}/cmdline").read_text(), "it is another program")
        assert handle.drain(60) and not has_imported(saver)
        assert stage(handle, SMALL, 1)
        until(lambda: has_imported(saver), "it was told of the slot")
        assert handle.drain(60) and saver_of(handle) == saver
    loaded = load_newest(tmp_path).loaded
    assert loaded is not None and is_whole(loaded)


def test_one_that_follows_another_looks_at_the_slots_at_once(tmp_path: Path) -> None:
    """Whatever the dead one had been told of: its successor is told nothing by whoever stages."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent) as handle:
        first = saver_of(handle)
        os.kill(first, signal.SIGKILL)
        until(lambda: handle.saver_pid not in (None, first), "another one was started")
        until(lambda: has_imported(saver_of(handle)), "it looks")


def test_what_is_imported_before_there_is_work_is_little() -> None:
    """No regular expressions, no dataclasses, no paths: each takes longer than all that there is."""
    told = "import sys; import checkflow.store.saver.__main__; print(*sys.modules)"
    command, root = [sys.executable, "-S", "-c", told], Path(checkflow.__file__).parents[1]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
    ours = {name for name in loaded.split() if name.startswith("checkflow.")}
    assert ours == {
        "checkflow.store",
        "checkflow.store.both",
        "checkflow.store.both.words",
        "checkflow.store.saver",
        "checkflow.store.saver.__main__",
    }
    assert not {"re", "dataclasses", "pathlib", "socket", "pydantic"} & set(loaded.split())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ([WAKE, NOW], [WAKE]),
        ([LAST, WAKE], [LAST, WAKE]),
        ([NOW], [NOW]),
        ([CLOSE], None),
        ([LAST, CLOSE], None),
        ([WAKE, CLOSE], [WAKE]),
        ([None], [b""]),
        ([LAST, None], [LAST, b""]),
    ],
)
def test_which_words_are_work(
    said: Sequence[bytes | None], heard: list[bytes] | None, ends: tuple[socket.socket, socket.socket]
) -> None:
    """None is the trainer's end of the socket, closed. What follows is left for whoever does the work."""
    ours, theirs = ends
    for word in said:
        if word is None:
            ours.close()
        else:
            ours.send(word)
    trainer = os.pidfd_open(os.getpid())
    assert heard_before_work(theirs.fileno(), trainer) == heard
    os.close(trainer)


@pytest.mark.parametrize("said", [[], [LAST]])
def test_the_trainers_end_is_work(said: list[bytes], ends: tuple[socket.socket, socket.socket]) -> None:
    """Though another process has its end of the socket, too."""
    ours, theirs = ends
    for word in said:
        ours.send(word)
    with subprocess.Popen(["true"]) as process:
        trainer = os.pidfd_open(process.pid)
        process.wait()
        assert heard_before_work(theirs.fileno(), trainer) == said
        os.close(trainer)
