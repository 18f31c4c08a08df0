"""The power goes at any moment: from whatever the device holds then, the newest durable checkpoint is restored."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from recording_disk import NameChange, RecordingDisk, State, Told
from small_store import SMALL, TINY, InProcess, newest_in_lanes, newest_whole

from checkflow.errors import CorruptStoreError
from checkflow.store.both.messages import DurableReport, Message
from checkflow.store.format.retention import Retention

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
STATES_AT_A_CUT = 2**16 if NIGHTLY else 512


def build(state: State, root: Path) -> None:
    root.mkdir()
    for name, content in state:
        path = root / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)


def record(store: Path, disk: RecordingDisk, lanes: int = 1) -> None:
    """Persist three checkpoints, retaining one, so that there is pruning too."""

    def told(message: Message) -> None:
        if isinstance(message, DurableReport):
            disk.told(message.iteration)

    layout = SMALL if lanes == 1 else TINY
    saver = InProcess(store, layout, disk, Retention(last=1), told, lanes=lanes)
    for iteration in (1, 2, 3):
        saver.persist(iteration)
    saver.close()


def wrong_restores(
    disk: RecordingDisk, where: Path, newest: Callable[[Path], int] = newest_whole
) -> Iterator[str | None]:
    """For every different state after every event: what restoring it got wrong, or None."""
    choose = random.Random(0)
    seen: set[tuple[State, int]] = set()
    for after in range(len(disk.events) + 1):
        durable = max((event.iteration for event in disk.events[:after] if isinstance(event, Told)), default=0)
        for state in disk.states(after, STATES_AT_A_CUT, choose):
            if (state, durable) in seen:
                continue
            seen.add((state, durable))
            build(state, where)
            try:
                restored = newest(where)
                yield None if restored >= durable else f"event {after}: {restored} restored, {durable} was durable"
            except (CorruptStoreError, AssertionError) as error:
                yield f"event {after}: {error}"
            finally:
                shutil.rmtree(where)


@pytest.mark.parametrize("direct_bytes", [4096, 2**20], ids=["direct writes", "buffered writes"])
def test_no_power_cut_loses_a_durable_checkpoint(
    tmp_path: Path, memory_path: Path, direct_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost and reordered writes and names, at every moment of three checkpoints and their pruning."""
    monkeypatch.setattr("checkflow.store.format.disk.DIRECT_BYTES", direct_bytes)
    disk = RecordingDisk(tmp_path / "store")
    record(tmp_path / "store", disk)
    outcomes = list(wrong_restores(disk, memory_path / "cut"))
    logging.getLogger(__name__).info("%d states", len(outcomes))
    assert len(outcomes) > 1000
    assert [wrong for wrong in outcomes if wrong] == []


def test_no_power_cut_loses_a_durable_checkpoint_in_lanes(tmp_path: Path, memory_path: Path) -> None:
    """Two of three lanes are second names of files of the checkpoint before, which is removed meanwhile."""
    disk = RecordingDisk(tmp_path / "store")
    record(tmp_path / "store", disk, lanes=3)
    assert sum(isinstance(event, NameChange) and event.inode is not None for event in disk.events) > 3 * (3 + 2 + 2)
    outcomes = list(wrong_restores(disk, memory_path / "cut", partial(newest_in_lanes, lanes=3, layout=TINY)))
    assert len(outcomes) > 1000
    assert [wrong for wrong in outcomes if wrong] == []


class ForgetfulDisk(RecordingDisk):
    """Leaves out one kind of sync."""

    forgotten = ""

    def sync(self, fd: int) -> None:
        if not Path(f"/proc/self/fd/{fd}").readlink().name.endswith(self.forgotten):
            super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        if ("the store" if path == self.root else "the checkpoint") != self.forgotten:
            super().sync_directory(path)


@pytest.mark.parametrize(
    "forgotten", ["model.safetensors", "commit.json", "manifest.json", "the checkpoint", "the store"]
)
def test_the_power_cut_has_teeth(tmp_path: Path, memory_path: Path, forgotten: str) -> None:
    """With any one sync left out some state restores wrong: the test above can fail."""
    disk = ForgetfulDisk(tmp_path / "store")
    disk.forgotten = forgotten
    record(tmp_path / "store", disk)
    assert any(wrong_restores(disk, memory_path / "cut"))
