"""What SIGTERM waits for among ranks: the next step(), as long as some rank has no part of what was saved last."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkflow.checkpointing.terminating import on_terminate, told
from checkflow.runtime.lifecycle import Inside
from checkflow.runtime.terminate import OnTerminate

DEADLINE_S = 60.0


class Rank:
    """One that has a checkpoint of each iteration; `voids`: of how many, from now on, another rank has no part."""

    def __init__(self, voids: int) -> None:
        self.voids = voids
        self.told: list[str] = []
        status = SimpleNamespace(write_ns=0, durable=0)
        rulings = SimpleNamespace(newest_is_void=lambda: self.voids > 0)
        self.engine: Any = SimpleNamespace(
            inside=nullcontext(),
            executor=SimpleNamespace(behind=False, unsaved=False, drain=lambda _: True),
            handle=SimpleNamespace(rulings=rulings, drain=lambda _: True, status=lambda: status),
        )

    def make_durable(self, deadline: float, *, at_step: bool, is_last: bool) -> float:
        installed = on_terminate(self.engine, None, Path("store"), DEADLINE_S, self.told.append)
        try:
            return installed._act(deadline, at_step=at_step, is_last=is_last)
        finally:
            installed.remove()


def test_what_some_rank_has_no_part_of_is_not_the_last() -> None:
    rank, deadline = Rank(voids=1), time.monotonic() + DEADLINE_S
    assert time.monotonic() < rank.make_durable(deadline, at_step=False, is_last=False) < deadline
    assert not rank.told
    assert rank.make_durable(deadline, at_step=True, is_last=True) == 0.0
    assert rank.told == ["store: SIGTERM: the last iteration is not durable at the deadline"]
    rank.voids, rank.told = 0, []
    assert rank.make_durable(deadline, at_step=True, is_last=False) == 0.0
    assert not rank.told


def test_what_is_given_up_in_flight_is_saved_once_more() -> None:
    """Whether the last iteration is saved is known only once its copies have ended."""
    rank, steps = Rank(voids=0), list[str]()
    executor = rank.engine.executor

    def drain(_: float) -> bool:
        steps.append("drain")
        executor.behind = executor.unsaved = "save" not in steps
        return True

    def save() -> bool:
        steps.append("save")
        return True

    executor.drain, executor.save = drain, save
    assert rank.make_durable(time.monotonic() + DEADLINE_S, at_step=True, is_last=True) == 0.0
    assert steps == ["drain", "save", "drain"] and not rank.told


@pytest.mark.parametrize("what", ["", "exit: "])
@pytest.mark.parametrize("named", ["store: ", "/here/store: ", ""])
def test_a_store_is_named_once(named: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver names it by its whole path."""
    monkeypatch.setattr(Path, "absolute", lambda path: Path("/here") / path)
    lines: list[str] = []
    with told(ValueError, lines.append, Path("store"), what):
        raise ValueError(f"{named}it is full")
    assert lines == [f"store: {what}it is full"]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that came through, as to a handler that the training has installed."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_steps_are_waited_for_until_every_rank_has_its_part(heard: list[int]) -> None:
    rank = Rank(voids=3)
    installed = OnTerminate(rank.make_durable, lambda _: 0.0, Inside(), DEADLINE_S, lambda: None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        while rank.voids:
            assert installed.pending and not heard and not rank.told
            rank.voids -= 1
            installed.reached_step()
        assert heard == [signal.SIGTERM] and not installed.pending and not rank.told
    finally:
        installed.remove()
