"""What an earlier saver wrote counts for retention only as far as it verifies, whether or not anybody restored it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_store import TINY, InProcess, newest_whole, silent

import checkflow
from checkflow.store.both.messages import Notice
from checkflow.store.format.reader import Checkpoint, list_checkpoints, newest, verify
from checkflow.store.format.retention import Retention


def written(store: Path, *iterations: int) -> None:
    """By an earlier saver, which retained them all."""
    saver = InProcess(store, TINY, retention=Retention(last=9))
    for iteration in iterations:
        saver.persist(iteration)
    saver.close()


def damage(store: Path, *iterations: int) -> None:
    """In the last tensor; the manifest is sound."""
    for found in list_checkpoints(store):
        if found.iteration in iterations:
            file = found.path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-3] + b"bad")


def left(store: Path) -> list[int]:
    return sorted(found.iteration for found in list_checkpoints(store))


def lines(saver: InProcess) -> list[str]:
    return [report.message for report in saver.reports if isinstance(report, Notice)]


def test_one_that_does_not_verify_takes_no_place(tmp_path: Path) -> None:
    """Nor do two; the good one before them goes once two newer ones were read back, and they are left for a person."""
    store = tmp_path / "store"
    written(store, 1, 2, 3, 4)
    damage(store, 3, 4)
    saver = InProcess(store, TINY, retention=Retention(last=2))
    saver.persist(5)
    assert left(store) == [2, 3, 4, 5]
    assert [line.partition(" does not verify (model.safetensors")[0].split()[-1] for line in lines(saver)] == [
        "00000004-iteration-4",
        "00000003-iteration-3",
    ]
    damage(store, 5)
    assert newest_whole(store, TINY) == 2
    saver.persist(6)
    assert left(store) == [3, 4, 5, 6]
    assert len(lines(saver)) == 2
    saver.close()


@pytest.mark.parametrize(
    ("last", "longest_s", "read"),
    [
        (1, 60.0, [[], [], []]),
        (2, 60.0, [[4], [], []]),
        (3, 60.0, [[4, 3, 2], [], []]),
        (3, 0.0, [[4], [], []]),
        (4, 0.0, [[4], [3], []]),
        (5, 60.0, [[4, 3], [2, 1], []]),
    ],
)
def test_each_that_counts_is_read_once(
    last: int, longest_s: float, read: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before something goes for it, newest first, one at least that verifies; never what this saver has read back."""
    monkeypatch.setattr("checkflow.store.saver.persister.EARLIER_S", longest_s)
    looked: list[int] = []

    def look(checkpoint: Checkpoint, progress: Callable[[], None]) -> None:
        looked.append(checkpoint.iteration)
        verify(checkpoint, progress)

    monkeypatch.setattr("checkflow.store.saver.persister.verify", look)
    store = tmp_path / "store"
    written(store, 0, 1, 2, 3, 4)
    damage(store, 3)
    saver = InProcess(store, TINY, retention=Retention(last=last))
    found = []
    for iteration in (5, 6, 7):
        looked.clear()
        saver.persist(iteration)
        found.append(list(looked))
    assert found == read
    saver.close()


def test_one_that_cannot_be_read_now_keeps_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and read with the next."""
    refused: list[int] = []

    def look(checkpoint: Checkpoint, progress: Callable[[], None]) -> None:
        if not refused:
            refused.append(checkpoint.iteration)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        verify(checkpoint, progress)

    monkeypatch.setattr("checkflow.store.saver.persister.verify", look)
    store = tmp_path / "store"
    written(store, 1, 2)
    saver = InProcess(store, TINY, retention=Retention(last=2))
    saver.persist(3)
    assert left(store) == [1, 2, 3]
    (line,) = lines(saver)
    assert "old checkpoints cannot be removed (Too many open files); allow more open files (ulimit -n)" in line
    saver.persist(4)
    assert left(store) == [3, 4]
    saver.close()


def test_what_a_restore_fell_back_to_is_retained(tmp_path: Path) -> None:
    """A run resumes from the good one, makes another one, and loses that: there is the good one still."""

    def train(until: int) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ckpt = checkflow.attach(
            model,
            optimizer,
            store=tmp_path / "store",
            retention=Retention(last=2),
            when_full="wait",
            persist_every=checkflow.PersistEvery(iterations=1),
            notify=silent,
            tell=silent,
        )
        with ckpt:
            resumed = ckpt.restore()
            for _ in range(resumed, until):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
        return resumed

    store = tmp_path / "store"
    train(3)
    damage(store, 3)
    assert train(3) == 2
    damage(store, 3)
    found = newest(store).checkpoint
    assert found is not None and found.iteration == 2
