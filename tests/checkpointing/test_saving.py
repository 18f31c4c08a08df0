"""What is asked for is durable when that returns, or is an error: whatever was told before, and however."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch

import checkflow
from checkflow.checkpointing.engine import Engine
from checkflow.checkpointing.saving import save_last
from checkflow.store.format.reader import list_checkpoints
from checkflow.store.trainer.handle import StoreHandle


@pytest.fixture
def hangs_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = StoreHandle.open.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(StoreHandle, "open", classmethod(lambda *args, **words: opened(*args, **words, hang_s=5.0)))


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.usefixtures("hangs_soon")
def test_with_a_saver_that_hangs_nothing_is_taken_for_durable(
    tmp_path: Path, on_error: Literal["raise", "warn"]
) -> None:
    """Each save() is an error, not the first alone; and a restore says that it goes back further than it should."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    told: list[str] = []

    def iterate(checkpointer: checkflow.Checkpointer) -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()

    with checkflow.attach(
        model, optimizer, store=tmp_path, on_error=on_error, notify=told.append, tell=lambda _: None
    ) as checkpointer:
        iterate(checkpointer)
        checkpointer.save()
        pid = checkpointer._handle.saver_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        iterate(checkpointer)
        for _ in range(2):
            with pytest.raises(checkflow.StoreError, match=r"has not moved|save: iteration 2 is not durable"):
                checkpointer.save()
        assert [each.iteration for each in list_checkpoints(tmp_path)] == [1]
        assert checkpointer.restore() == 1
        assert any("restore: the newest iteration is not durable; an older one comes" in line for line in told)
        os.kill(pid, signal.SIGCONT)
        iterate(checkpointer)
        checkpointer.save()


@pytest.mark.parametrize(("answers", "lines"), [([True], 0), ([False, True], 1), ([False, False, True], 1)])
def test_close_says_that_it_tries_the_last_checkpoint_again(answers: list[bool], lines: int, tmp_path: Path) -> None:
    """Once, and for how long: nobody is to take it for hanging."""
    left, told = iter(answers), list[str]()
    handle = SimpleNamespace(drain=lambda _: next(left), saver_pid=1)
    engine = SimpleNamespace(executor=SimpleNamespace(unsaved=False, drain=lambda: True), handle=handle)
    save_last(cast("Engine", engine), told.append, tmp_path, ranks=False)
    assert told == [f"{tmp_path}: close() tries the last checkpoint again, for up to 30 s"] * lines
    assert not list(left)
