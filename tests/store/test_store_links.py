"""Files of a lane that was not staged since: a second name in the next checkpoint, and never a wrong byte."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
from small_store import SMALL, InProcess, newest_in_lanes
from test_store_faults import FailingDisk

from checkflow.lanes import lane_file
from checkflow.store.both.messages import DurableReport, FailedReport, Notice, VerifiedReport
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.manifest import directory_name
from checkflow.store.format.retention import Retention
from checkflow.store.format.writer import INCOMPLETE, PRUNED

LANES = 3


def saver_of(store: Path, disk: LocalDisk | None = None, retention: Retention | None = None) -> InProcess:
    return InProcess(store, disk=disk or LocalDisk(), retention=retention or Retention(last=1), lanes=LANES)


def inodes(store: Path, iteration: int) -> dict[str, int]:
    """Of a checkpoint's files of tensors, by name."""
    folder = store / directory_name(iteration, iteration)
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.name.startswith("lane-")}


def test_only_the_lane_that_was_staged_is_written(tmp_path: Path) -> None:
    """A third of the bytes each time; what retention removes takes no byte of the next one along."""
    saver = saver_of(tmp_path / "store")
    found: list[dict[str, int]] = []
    for iteration in range(1, 8):
        saver.persist(iteration)
        found.append(inodes(tmp_path / "store", iteration))
        assert newest_in_lanes(tmp_path / "store", LANES) == iteration
    saver.close()
    for iteration, (before, after) in enumerate(pairwise(found), start=2):
        new = {name for name, inode in after.items() if inode != before[name]}
        assert new == {lane_file(iteration % LANES, file.name) for file in SMALL.files}
    durable = [report for report in saver.reports if isinstance(report, DurableReport)]
    first, *others = durable
    assert first.written_bytes > 2 * others[0].written_bytes
    of_a_lane = sum(file.size_bytes for file in SMALL.files)
    assert {report.size_bytes - report.written_bytes for report in others} == {2 * of_a_lane}
    assert [path.name for path in (tmp_path / "store").glob("0*")] == [directory_name(7, 7)]


def test_what_is_written_again_though_nothing_was_staged_needs_no_byte(tmp_path: Path) -> None:
    """A checkpoint that is asked for while it is written is another one, of the same files."""
    saver = InProcess(tmp_path / "store", retention=Retention(last=2))
    taken = saver.take(1)
    assert saver.persister.write(taken) and saver.persister.write(taken)
    saver.close()
    one, other = sorted((tmp_path / "store").glob("0*"))
    for file in SMALL.files:
        assert (one / file.name).samefile(other / file.name)


class NoLinks(LocalDisk):
    """As FAT."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))


def test_a_file_system_without_second_names_is_written_to(tmp_path: Path) -> None:
    """As a whole, each time, and nobody is told."""
    saver = saver_of(tmp_path / "store", NoLinks())
    for iteration in range(1, 5):
        saver.persist(iteration)
        assert newest_in_lanes(tmp_path / "store", LANES) == iteration
    saver.close()
    assert not [report for report in saver.reports if isinstance(report, FailedReport | Notice)]


def test_a_checkpoint_that_somebody_removed_is_not_needed(tmp_path: Path) -> None:
    """Its bytes are still in memory."""
    saver = saver_of(tmp_path / "store")
    saver.persist(1)
    for path in sorted((tmp_path / "store").rglob("0*/*")):
        path.unlink()
    saver.persist(2)
    saver.close()
    assert newest_in_lanes(tmp_path / "store", LANES) == 2


def test_what_did_not_read_back_is_not_handed_on(tmp_path: Path) -> None:
    """A file that the disk damaged: the next checkpoint has its lane from memory again."""
    store = tmp_path / "store"
    saver = saver_of(store)
    saver.persist(1)
    written = saver.persister.write(saver.take(2))
    assert written is not None
    damaged = store / directory_name(2, 2) / lane_file(0, "model.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    saver.persister.settle((written,))
    assert isinstance(saver.reports[-1], FailedReport)
    saver.persist(3)
    saver.persist(4)
    saver.close()
    assert isinstance(saver.reports[-1], VerifiedReport)
    assert newest_in_lanes(store, LANES) == 4


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMLINK])
def test_each_operation_fails_in_turn(tmp_path: Path, memory_path: Path, error: int) -> None:
    """A name that cannot be given is no failure; whatever else fails is told once, and the store stays good."""
    disk = FailingDisk()
    saver = saver_of(tmp_path / "counted", disk)
    saver.persist(1)
    first = disk.done
    saver.persist(2)
    saver.close()
    count = disk.done - first
    quiet = 0
    for number in range(1, count + 1):
        store = memory_path / str(number)
        disk = FailingDisk(error=error)
        saver = saver_of(store, disk)
        saver.persist(1)
        disk.fails = disk.done + number
        del saver.reports[:]
        saver.persist(2)
        failures = [report for report in saver.reports if isinstance(report, FailedReport | Notice)]
        durable = any(isinstance(report, DurableReport) for report in saver.reports)
        assert len(failures) == 1 or (durable and not failures), number
        quiet += not failures
        assert newest_in_lanes(store, LANES) in ((2,) if durable else (1, 2))
        saver.persist(3)
        assert isinstance(saver.reports[-1], VerifiedReport), number
        assert newest_in_lanes(store, LANES) == 3
        saver.persister.remove_leftovers()
        assert not [path for path in store.iterdir() if path.name.startswith((INCOMPLETE, PRUNED))]
        saver.close()
    assert quiet == (LANES - 1) * len(SMALL.files)
