"""Checkpoints that come into an open store from elsewhere, and those written after them: the later one is the newer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from small_store import SMALL, InProcess, newest_whole, silent, stage, until_idle

import checkflow
from checkflow.store.format import reader, writer
from checkflow.store.format.manifest import BLOCK_BYTES, MANIFEST, FileEntry, Manifest, parse_manifest
from checkflow.store.format.reader import Checkpoint, SkippedCheckpoint, checkpoint_names, list_checkpoints
from checkflow.store.format.received import receive_checkpoint
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery


def elsewhere(folder: Path, iteration: int) -> Checkpoint:
    saver = InProcess(folder)
    saver.persist(iteration)
    saver.close()
    (found,) = list_checkpoints(folder)
    assert isinstance(found, Checkpoint)
    return found


def bring(store: Path, found: Checkpoint) -> None:
    def blocks() -> Iterator[bytes]:
        for entry in found.manifest.files:
            with (found.path / entry.name).open("rb") as file:
                yield from iter(lambda: file.read(BLOCK_BYTES), b"")

    receive_checkpoint(store, (found.path / MANIFEST).read_bytes(), blocks())


def test_no_serial_is_given_twice(tmp_path: Path) -> None:
    """A run comes back to an iteration that the bucket alone has, and goes on from there."""
    store = tmp_path / "store"
    nine = elsewhere(tmp_path / "elsewhere", 9)
    with StoreHandle.open(store, [SMALL], notify=silent, persist_every=PersistEvery(iterations=1)) as handle:
        for iteration in (28, 29, 30):
            assert stage(handle, SMALL, iteration)
            until_idle(handle, iteration)
        with handle.shared.restoring():
            bring(store, nine)
        assert stage(handle, SMALL, 10)
        until_idle(handle, 10)
    serials = [name.partition("-")[0] for name in checkpoint_names(store)]
    assert len(serials) == len(set(serials)) and newest_whole(store) == 10


def test_each_restore_in_mid_run_has_the_saver_look(tmp_path: Path) -> None:
    """Whatever it brings, and whether it ends well."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with checkflow.attach(model, optimizer, store=tmp_path, tell=silent) as checkpointer:
        checkpointer.step()
        shared = checkpointer._handle.shared
        before = shared.arrivals
        checkpointer.restore()
        between = shared.arrivals
        with pytest.raises(checkflow.StoreError):
            checkpointer.restore(7)
        assert before < between < shared.arrivals


def test_a_clock_that_is_set_back_makes_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is newest on disk, or in a bucket, is known by when it was created."""
    now = [datetime(2099, 1, 1, tzinfo=UTC)]

    class Clock(datetime):
        @classmethod
        def now(cls, _zone: object = None) -> datetime:  # type: ignore[override]
            return now[0]

    monkeypatch.setattr(writer, "datetime", Clock)

    def created(iteration: int) -> str:
        saver.persist(iteration)
        newest = list_checkpoints(tmp_path)[0]
        assert isinstance(newest, Checkpoint) and newest.iteration == iteration
        return newest.manifest.created

    saver = InProcess(tmp_path)
    assert created(1) == "2099-01-01T00:00:00+00:00"
    now[0] = datetime(2026, 1, 1, tzinfo=UTC)
    assert created(2) == "2099-01-01T00:00:01+00:00"
    saver.close()
    saver = InProcess(tmp_path)  # which knows of those before it by what is on disk
    assert created(1) == "2099-01-01T00:00:02+00:00"  # a run that came back to an earlier iteration
    now[0] = datetime(2099, 1, 2, tzinfo=UTC)
    assert created(2) == created(3) == "2099-01-02T00:00:00+00:00"
    saver.close()


def test_a_time_after_the_last_one_is_the_last_one() -> None:
    """What is written can be read, however late somebody's clock once was."""
    last = "9998-12-31T23:59:59+00:00"
    assert [writer.created(after) for after in ("9998-12-31T23:59:58+00:00", last)] == [last, last]
    manifest = Manifest(
        serial=1, iteration=1, keep=False, created=last, versions={},
        files=(FileEntry(name="commit.json", size_bytes=0, blocks=""),),
    )  # fmt: skip
    assert parse_manifest(manifest.render()).created == last


def test_when_the_newest_was_is_read_of_the_newest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may have thousands, and nobody waits until each manifest is read; a damaged one has no time."""
    saver = InProcess(tmp_path, retention=Retention(last=9))
    saver.persist(1, 2, 3)
    saver.close()
    newest = list_checkpoints(tmp_path)[0].path
    (newest / "manifest.json").write_bytes(b"{}")
    looked: list[str] = []
    examine = reader.examine

    def counted(store: Path, name: str) -> Checkpoint | SkippedCheckpoint:
        looked.append(name)
        return examine(store, name)

    monkeypatch.setattr(reader, "examine", counted)
    assert writer.newest_created(tmp_path)
    assert looked == [newest.name, "00000002-iteration-2"]
