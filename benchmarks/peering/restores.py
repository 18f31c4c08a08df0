"""From a new process's start to the restored model: files not in memory, in memory, after a killed trainer."""

from __future__ import annotations

import os
import time
from pathlib import Path

from contenders import Job

from .orders import Attach, Done, Restore, Restored, Saved, SaveOne, Train, Turn
from .processes import Process, worker
from .results import Restore as Figures

SAVES = 3


def measure(contender: str, job: Job, log: Path) -> list[Figures]:
    """Save, restore cold and warm, train on, kill, restore. Raises ToolError."""
    with worker(job.workload, contender, log) as saver:
        saver.ask(Attach(job), Done)
        for _ in range(SAVES):
            saved = saver.ask(SaveOne(), Saved)
    figures = []
    for case in ("cold", "warm"):
        if case == "cold":
            forget(job.folder)
        with worker(job.workload, contender, log) as fresh:
            figures.append(_restored(fresh, contender, job, case, saved.iteration, saved.digest))
    expected = _killed_while_training(contender, job, log)
    with worker(job.workload, contender, log) as fresh:
        figures.append(_restored(fresh, contender, job, "killed", expected, None))
    return figures


def _killed_while_training(contender: str, job: Job, log: Path) -> int:
    """SIGKILL of the trainer alone, in the middle of an iteration; how many it had completed."""
    victim = Process(job.workload, contender, log)
    victim.ask(Attach(job), Done)
    restored = victim.ask(Restore(), Restored)
    turn = victim.ask(Train(2), Turn)
    victim.tell(Train(1000))
    time.sleep(turn.times_s[-1] * 0.5)
    victim.kill_trainer()
    return restored.iteration + len(turn.times_s)


def _restored(fresh: Process, contender: str, job: Job, case: str, expected: int, digest: str | None) -> Figures:
    fresh.ask(Attach(job), Done)
    restored = fresh.ask(Restore(), Restored)
    return Figures(
        workload=job.workload,
        contender=contender,
        tier=job.tier,
        case=case,
        total_s=restored.ended - fresh.started,
        tool_s=restored.attach_s + restored.restore_s,
        iteration=restored.iteration,
        expected=expected,
        exact=None if digest is None else restored.digest == digest,
    )


def forget(folder: Path) -> None:
    """Drop the files from the page cache. The program's own files stay there."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
