"""What the user attaches may grow without a limit that anybody meets; where memory is refused, no slot is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_attach import EVERY, compiled, small

import checkflow
from checkflow.errors import StoreError
from checkflow.store.format.reader import load_newest
from checkflow.store.memory.allowance import Allowance


def test_metadata_that_grows_is_staged_each_iteration_and_found_again(tmp_path: Path) -> None:
    """From nothing to 20 MB, while a slot's own room is some 100 KiB."""
    training, schedule, metadata = small(), compiled(small), dict[str, object]()
    with checkflow.attach(
        training.model, training.optimizer, schedule=schedule, store=tmp_path, metadata=metadata, when_full="wait",
        persist_every=EVERY,
    ) as ckpt:  # fmt: skip
        for iteration in range(1, 9):
            training.iteration()
            metadata["history"] = "x" * (1000 * 4**iteration // 4)
            ckpt.step()
        ckpt.save()
        assert ckpt.stats().skipped == ckpt.stats().discarded == 0
        assert ckpt.status().staged == 8
    loaded = load_newest(tmp_path).loaded
    assert loaded is not None and json.loads(loaded.record)["metadata"] == metadata
    again = small()
    with checkflow.attach(again.model, again.optimizer, schedule=schedule, store=tmp_path) as ckpt:
        assert ckpt.restore() == 8


def test_where_memory_for_it_is_refused_no_slot_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal is an error; once it fits again each iteration is staged."""
    training, metadata = small(), dict[str, object]()
    ckpt = checkflow.attach(
        training.model, training.optimizer, schedule=compiled(small), store=tmp_path, metadata=metadata
    )
    with monkeypatch.context() as refusing:
        refusing.setattr("checkflow.store.memory.record_overflow.allowance", lambda: Allowance(5, "a limit"))
        metadata["history"] = "x" * 10**6
        refused = 0
        for _ in range(6):  # more than there are slots
            training.iteration()
            try:
                ckpt.step()
            except StoreError as error:
                assert "put less into metadata=" in str(error)
                refused += 1
        assert refused >= 5
    metadata.clear()
    before = ckpt.status().staged
    for _ in range(5):
        training.iteration()
        ckpt.step()
    ckpt.save()
    assert ckpt.status().staged - before >= 5
    ckpt.close()
