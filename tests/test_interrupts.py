"""Ctrl-C and SIGTERM: what is held back is not lost, and no process that was being started outlives them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest
from interrupting import interrupted_at
from processes import children

from checkflow.interrupts import held_back, killed_at_the_end, let_through, sleep


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_what_is_held_back_comes_at_the_end_or_where_it_is_let_through(number: signal.Signals) -> None:
    """Once, and by the handler that the program had."""
    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        seen.append(number)

    before = signal.signal(number, handler)
    try:
        with held_back(sigterm=True):
            with held_back(sigterm=True):
                signal.raise_signal(number)
                assert not seen
            assert not seen
            let_through()
            assert seen == [number]
            let_through()
            signal.raise_signal(number)
            signal.raise_signal(number)
        assert seen == [number] * 3
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_handler_that_raises_leaves_both_as_they_were() -> None:
    """Of two that were held back the first ends the block; the handlers are the program's again."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), held_back(sigterm=True):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_handler_that_raises_leaves_none_of_the_others_out() -> None:
    """A preempted job's signal is not lost to a time-out that came with it."""
    seen: list[int] = []

    def expired(_number: int, _: object) -> None:
        raise TimeoutError

    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM)
    before = [signal.signal(number, lambda received, _: seen.append(received)) for number in numbers]
    signal.signal(signal.SIGALRM, expired)
    try:
        with pytest.raises(TimeoutError), held_back(sigterm=True):
            for number in numbers:
                signal.raise_signal(number)
        assert seen == [signal.SIGUSR1, signal.SIGTERM]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_an_interrupt_ends_a_sleep_in_which_it_is_held_back() -> None:
    with held_back(sigterm=True):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            sleep(600)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"])


def test_an_interrupt_while_a_process_is_being_started_ends_it() -> None:
    """It comes when the process runs and nobody has its handle yet."""
    before = children()
    started: list[int] = []

    def start() -> subprocess.Popen[bytes]:
        process = _sleeper()
        started.append(process.pid)
        signal.raise_signal(signal.SIGINT)
        return process

    with pytest.raises(KeyboardInterrupt), killed_at_the_end(start):
        pytest.fail("the block is not entered")
    assert started and children() == before


def test_an_interrupt_at_any_line_leaves_no_process() -> None:
    """Each line of the package that starting and ending run."""
    before = children()
    with interrupted_at(0) as lines, killed_at_the_end(_sleeper):
        pass
    for line in range(1, lines[0] + 1):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(line), killed_at_the_end(_sleeper):
            pass
        assert children() == before, line
