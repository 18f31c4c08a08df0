"""A process hangs that does not move while somebody looks; who did not look, or was stopped, too, knows nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
from small_store import SMALL, newest_whole, stage, stopped, until_idle

from checkflow.store.both.stillness import LOOKS, Stillness
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery


def opened(path: Path, told: list[str], *, hang_s: float) -> StoreHandle:
    return StoreHandle.open(
        path, [SMALL], notify=told.append, on_error="warn", persist_every=PersistEvery(iterations=1), hang_s=hang_s
    )


def test_of_a_gap_between_looks_a_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    still = Stillness(120.0)

    def look(after_s: float, progress: object) -> bool:
        now[0] += after_s
        return still.exceeds(progress)

    assert not look(0, 1) and not look(1e6, 1)  # both were stopped for long
    assert not look(1e6, None) and not look(1e6, 1)  # there was nothing to do
    assert not any(look(10, 1) for _ in range(12)) and look(10, 1) and look(0, 1)
    assert not look(1, 2)
    assert not any(look(1e6, 2) for _ in range(LOOKS)) and look(1e6, 2)


@pytest.mark.parametrize("then", ["poll", "drain"])
def test_a_loop_that_does_something_else_for_long_has_no_saver_that_hangs(
    then: Literal["poll", "drain"], tmp_path: Path
) -> None:
    """An evaluation, after which the checkpoint is due that ends it: the saver has not had the time to begin."""
    told: list[str] = []
    with opened(tmp_path, told, hang_s=5.0) as handle:
        for iteration in (1, 2):
            time.sleep(5.5)
            assert stage(handle, SMALL, iteration)
            if then == "poll":
                handle.poll()
                until_idle(handle, iteration)
            else:
                assert handle.drain(60)
    assert not told and newest_whole(tmp_path) == 2


def test_nor_has_a_job_that_was_stopped_as_a_whole(tmp_path: Path) -> None:
    """As where a scheduler suspends it: work is left, and nobody has moved."""
    told: list[str] = []
    with opened(tmp_path, told, hang_s=5.0) as handle:
        with stopped(handle):
            assert stage(handle, SMALL, 1)
            handle.poll()
            time.sleep(5.5)  # in which this process does nothing either
            handle.poll()
        until_idle(handle, 1)
    assert not told


def test_one_that_hung_and_goes_on_is_waited_for_again(tmp_path: Path) -> None:
    told: list[str] = []
    with opened(tmp_path, told, hang_s=1.0) as handle:
        with stopped(handle):
            assert stage(handle, SMALL, 1)
            assert not handle.drain(60)
            assert len(told) == 1 and "has not moved" in told[0]
            assert not handle.drain(60)  # it still does
        assert handle.drain(60)
    assert len(told) == 1
