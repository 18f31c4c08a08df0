"""SIGTERM to a main thread that never comes back to Python: a process that it would have ended ends by the deadline."""

from __future__ import annotations

import os
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import descriptors, until
from programs import Program
from test_attach import attached, compiled, small

from checkflow.runtime import terminate
from checkflow.runtime.lifecycle import Inside
from checkflow.runtime.listener import SignalListener
from checkflow.runtime.terminate import OnTerminate, _allowed_s
from checkflow.schedule import write_schedule

SCRIPT = """
    import ctypes, os, signal, sys
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {here!r})
    import checkflow
    from test_attach import small
    def hang(until):  # outside of Python, as a collective whose other side is gone: no handler runs from "now" on
        ctypes.CDLL(None).system(f"echo now; exec >&- 2>&-; {{until}}".encode())
    training = small()
    {before}
    with checkflow.attach(
        training.model, training.optimizer, schedule={schedule!r}, store={store!r}, when_full="wait",
        tell=lambda line: None, sigterm_deadline_s=2.0,
    ) as ckpt:
        for iteration in range(ckpt.restore(), 10**9):
            if iteration == 5:
                {hang}
            training.iteration()
            ckpt.step()
"""


FOR_GOOD = "hang('while kill -0 $PPID; do sleep 0.1; done')"


def _program(tmp_path: Path, *, interval: int, before: str = "pass", hang: str = FOR_GOOD) -> Program:
    write_schedule(tmp_path / "schedule.json", compiled(small, interval=interval))
    text = textwrap.dedent(SCRIPT).format(
        here=str(Path(__file__).parent), schedule=str(tmp_path / "schedule.json"), store=str(tmp_path / "store"),
        before=before, hang=hang,
    )  # fmt: skip
    return Program(text, stderr=tmp_path / "stderr")


def _restored(tmp_path: Path, interval: int) -> int:
    with attached(small(), compiled(small, interval=interval), tmp_path / "store", notify=lambda _: None) as ckpt:
        return ckpt.restore()


LINE = "SIGTERM: training did not come back by the deadline; the saver writes what was staged"


@pytest.mark.parametrize("heard", ["by nobody", "by the handler", "by the handler alone"])
def test_what_hangs_ends_by_the_deadline(heard: str, tmp_path: Path) -> None:
    """And what was staged is durable. Where the handler ran, it waits for a step() that never comes."""
    before, hang, interval = "pass", FOR_GOOD, 1
    if heard != "by nobody":
        hang, interval = f"os.kill(os.getpid(), signal.SIGTERM); {FOR_GOOD}", 4
    if heard == "by the handler alone":
        before = "import socket; ours, theirs = socket.socketpair(); ours.setblocking(False); " + (
            "signal.set_wakeup_fd(ours.fileno())"
        )
    process = _program(tmp_path, interval=interval, before=before, hang=hang)
    process.until("now")
    if heard == "by nobody":
        process.send_signal(signal.SIGTERM)
    assert process.end()[0] == -signal.SIGTERM
    assert f"checkflow: {tmp_path / 'store'}: {LINE}\n" in process.complaint()
    assert _restored(tmp_path, interval) == (5 if heard == "by nobody" else 4)


def test_a_containers_first_process_that_hangs_ends_too(tmp_path: Path) -> None:
    """The kernel drops what such a process sends to itself and does not handle."""
    process = _program(tmp_path, interval=1, before="os.kill = lambda *_: None")
    process.until("now")
    process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 143


def test_what_a_users_own_handler_would_not_have_ended_hangs_on(tmp_path: Path) -> None:
    """It is called when the main thread is back."""
    handler = "lambda *_: (print('heard', flush=True), os._exit(7))"
    process = _program(tmp_path, interval=1, before=f"signal.signal(signal.SIGTERM, {handler})", hang="hang('sleep 6')")
    process.until("now")
    process.send_signal(signal.SIGTERM)
    code, out = process.end()
    assert (code, out) == (7, "heard\n")
    assert LINE not in process.complaint()


@pytest.fixture
def unhandled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def _installed(deadline_s: float = 60.0) -> OnTerminate:
    return OnTerminate(lambda *_, **__: 0.0, lambda _: 0.0, Inside(), deadline_s, lambda: None)


def _wakeup_fd() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize("order", ["older first", "newer first"])
def test_one_thread_listens_until_the_last_is_removed(order: str) -> None:
    """Then handler, descriptors and threads are as before, whichever goes first."""
    before = descriptors(os.getpid()), set(threading.enumerate()), _wakeup_fd()
    both = [_installed(60.0), _installed(30.0)]
    assert _allowed_s() == 90.0
    assert len(set(threading.enumerate()) - before[1]) == 1
    first, last = both if order == "older first" else reversed(both)
    first.remove()
    assert _allowed_s() == (30.0 if order == "older first" else 60.0)
    last.remove()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (descriptors(os.getpid()), set(threading.enumerate()), _wakeup_fd()) == before


@pytest.mark.usefixtures("unhandled")
def test_what_another_handler_decides_has_no_deadline() -> None:
    """Of the user's, before or since."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    installed = _installed()
    assert _allowed_s() is None
    installed.remove()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    installed = _installed()
    assert _allowed_s() is None
    installed.remove()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    installed = _installed()
    assert _allowed_s() == 60.0
    signal.signal(signal.SIGTERM, lambda *_: None)
    assert _allowed_s() is None
    installed.remove()


@pytest.mark.usefixtures("unhandled")
def test_a_forked_child_has_sigterm_as_it_was() -> None:
    """Nothing of its parent's, whose descriptor is not its own either."""
    installed = [_installed(), _installed()]
    child = os.fork()
    if not child:
        as_before = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and _wakeup_fd() == -1
        os._exit(0 if as_before and _allowed_s() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _allowed_s() == 120.0
    for each in installed:
        each.remove()


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize("whose", ["child's", "own"])
def test_a_signal_counts_for_the_process_that_got_it(whose: str) -> None:
    """A child that is terminated before anything of it has run has its parent's handler and descriptor."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    looked: list[float] = []

    def allowed_s() -> float:
        looked.append(60.0)
        return 60.0

    listener = SignalListener(signal.SIGTERM, allowed_s, lambda: None)
    try:
        until(lambda: len(looked) == 1)
        child = os.fork() if whose == "child's" else 0
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            if whose == "child's":
                os._exit(0)
        else:
            os.waitpid(child, 0)
        until(lambda: len(looked) == 2)
        assert (listener.since is None) == (whose == "child's")
    finally:
        listener.close()


@pytest.mark.usefixtures("unhandled")
def test_a_descriptor_that_somebody_has_stays_theirs() -> None:
    """Theirs before, or since."""
    hears, tells = socket.socketpair()
    with hears, tells:
        tells.setblocking(False)
        before = signal.set_wakeup_fd(tells.fileno())
        installed = _installed()
        assert _wakeup_fd() == tells.fileno()
        installed.remove()
        assert _wakeup_fd() == tells.fileno()
        signal.set_wakeup_fd(-1)
        installed = _installed()
        assert _wakeup_fd() not in (-1, tells.fileno())
        signal.set_wakeup_fd(tells.fileno())
        installed.remove()
        assert _wakeup_fd() == tells.fileno()
        signal.set_wakeup_fd(before)


@pytest.mark.usefixtures("unhandled")
def test_a_handler_that_comes_late_has_what_is_left() -> None:
    """Of the deadline, which counts from the signal."""
    deadlines: list[float] = []

    def act(deadline: float, **_: bool) -> float:
        deadlines.append(deadline)
        return time.monotonic() + 60.0

    installed = OnTerminate(act, lambda _: 0.0, Inside(), 60.0, lambda: None)
    began = time.monotonic()
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler)
    listener = terminate._installed._listener
    assert listener is not None
    listener.tell()
    until(lambda: listener.since is not None)
    heard = time.monotonic()
    until(lambda: time.monotonic() > heard)
    handler(signal.SIGTERM, None)
    assert began + 60.0 <= deadlines[0] <= heard + 60.0
    installed._forget()
    installed.remove()
