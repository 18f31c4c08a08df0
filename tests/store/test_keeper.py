"""Who starts savers: whatever keeps it from that is told, and nobody waits for what will not come."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_store import SMALL, saver_of, silent, stage, until, until_idle

from checkflow.errors import StoreError
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.store.trainer.saver_process import SaverProcess

EACH = PersistEvery(iterations=1)


def test_a_program_may_put_anything_into_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks at nothing in it but strings: so do the processes that are started beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), None])
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=EACH) as handle:
        assert stage(handle, SMALL, 1)
        until_idle(handle, 1)


def test_whatever_keeps_a_saver_from_starting_is_told_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once it does not, one starts."""
    with StoreHandle.open(tmp_path, [SMALL], notify=silent, persist_every=EACH, retry_s=0.2) as handle:
        keeper = handle._saver._keeper
        start = keeper._start

        def fails() -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(keeper, "_start", fails)
        saver = saver_of(handle)
        handle._saver._keeper.saver.kill()  # type: ignore[union-attr]
        until(lambda: handle._saver.is_lost, "it was tried for as long as it should")
        assert saver and stage(handle, SMALL, 1)
        with pytest.raises(StoreError, match=r"died \d+ times in a row \(last: MemoryError: none left\)"):
            handle.poll()
        monkeypatch.setattr(keeper, "_start", start)
        assert handle.drain(60)


def test_without_its_thread_no_slot_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `wait`, too: it is told why, and a checkpoint that finds no slot is none."""
    handle = StoreHandle.open(
        tmp_path, [SMALL], slots=2, when_full="wait", notify=silent, persist_every=EACH, on_error="warn"
    )
    keeper, told = handle._saver._keeper, list[str]()
    monkeypatch.setattr(handle, "_notify", told.append)
    monkeypatch.setattr(handle._news, "_notify", told.append)

    def fails(_: str) -> None:
        raise ValueError("not foreseen")

    monkeypatch.setattr(keeper, "_note_death", fails)
    saver = keeper.saver
    assert isinstance(saver, SaverProcess)
    saver.kill()
    until(lambda: handle._saver.is_lost, "the thread has ended")
    for iteration in range(1, 5):
        stage(handle, SMALL, iteration)
    handle.poll()
    assert any("is not followed by another any more: internal error" in line for line in told)
    assert handle.status().skipped
    handle.close(deadline_s=1.0)
