"""What the user's functions that take lines raise, and a stderr that nobody reads, cost no iteration."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from programs import Program

import checkflow

TRAINS = """
import sys, torch, checkflow
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
with checkflow.attach(model, optimizer, store=sys.argv[1]) as ckpt:
    for i in range(ckpt.restore(), int(sys.argv[2])):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    print(ckpt.status().staged_iteration)
"""


def test_what_a_stores_name_would_do_to_a_terminal_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """In one line, whoever is told."""
    monkeypatch.chdir(tmp_path)
    model, told = torch.nn.Linear(4, 4), list[str]()
    store = "a\nb\x1b[1m"
    with checkflow.attach(model, torch.optim.SGD(model.parameters()), store=store, tell=told.append) as ckpt:
        ckpt.restore()
        ckpt._notify(f"{ckpt._store}: a warning")
    assert told and [line for line in told if not line.isprintable()] == []
    assert str(recwarn.pop(UserWarning).message) == "a b\\x1b[1m: a warning"


class Raising:
    """A function of the user's that fails each time."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        raise ValueError(f"call {len(self.lines)}")


@pytest.mark.parametrize("which", ["notify", "warnings as errors"])
def test_an_iteration_in_which_it_raises_counts_and_is_saved(tmp_path: Path, which: str) -> None:
    """Each line is told once, though telling it failed."""
    model, notify = torch.nn.Linear(4, 4), Raising()
    optimizer = torch.optim.AdamW(model.parameters())
    mean = model.weight.detach().clone()  # which nobody lists
    errors = 0
    given = {"notify": notify} if which == "notify" else {}
    with (
        warnings.catch_warnings(action="error" if not given else "default"),
        checkflow.attach(model, optimizer, store=tmp_path, tell=lambda _: None, **given) as ckpt,  # type: ignore[arg-type]
    ):
        for _ in range(10):
            torch.autograd.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                mean.lerp_(model.weight, 0.1)
            try:
                ckpt.step()
            except (ValueError, UserWarning):
                errors += 1
        assert ckpt.status().staged_iteration == 10
    assert errors == 1
    assert not given or (len(notify.lines) == 1 and "in no checkpoint" in notify.lines[0])
    again = torch.nn.Linear(4, 4)
    with checkflow.attach(again, torch.optim.AdamW(again.parameters()), store=tmp_path, tell=lambda _: None) as ckpt:
        assert ckpt.restore() == 10
    assert torch.equal(again.weight, model.weight)


def test_what_is_told_while_an_error_leaves_the_block_is_not_lost(tmp_path: Path) -> None:
    """Telling it fails, and telling of that; the training's own error is seen with it."""
    model, notify = torch.nn.Linear(4, 4), Raising()
    optimizer = torch.optim.SGD(model.parameters())
    with (
        pytest.raises(ValueError, match="call 2") as caught,
        checkflow.attach(model, optimizer, store=tmp_path, tell=lambda _: None, notify=notify) as ckpt,
    ):
        ckpt.step()
        ckpt._notify("the disk is full")
        raise KeyError("of the training")
    assert isinstance(caught.value.__context__, KeyError)
    assert notify.lines == ["the disk is full", f"{tmp_path}: call 1"]


def test_while_attaching_it_is_raised_at_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="call 1"):
        checkflow.attach(model, torch.optim.SGD(model.parameters()), store=tmp_path, tell=Raising())


@pytest.mark.parametrize("how", ["none", "closed", "unread"])
def test_a_stderr_that_nobody_reads_ends_no_training(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    unread = os.fdopen(writes, "w", buffering=1)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "unread": unread}[how])
    model = torch.nn.Linear(4, 4)
    with checkflow.attach(model, torch.optim.SGD(model.parameters()), store=tmp_path) as ckpt:
        ckpt.step()
    monkeypatch.undo()
    with contextlib.suppress(BrokenPipeError):  # of what was not written
        unread.close()


def test_whoever_changes_the_directory_moves_no_store(tmp_path: Path) -> None:
    """A store that was named by a relative path stays where it was, and nobody is told that it was moved."""
    begins, other = tmp_path / "begins", tmp_path / "other"
    begins.mkdir()
    other.mkdir()
    leaves = f"    import os; os.chdir({str(other)!r})\n    for i"
    text = f"import os; os.chdir({str(begins)!r})" + TRAINS.replace("    for i", leaves)
    for end in (12, 13):
        trainer = Program(text, "store", str(end))
        with trainer.stdout, trainer.stderr:
            said, told = trainer.stdout.read(), trainer.stderr.read()
        assert trainer.wait(60.0) == 0, told
        assert said.split() == [str(end)] and "moved" not in told, told
    assert not list(other.iterdir())
