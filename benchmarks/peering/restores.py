"""From a new process's start to the restored model: files not in memory, in memory, after a killed trainer."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from contenders import Job

from .orders import Attach, Build, Detach, Done, Restore, Restored, Saved, SaveOne, Train, Turn
from .processes import Process, worker
from .results import Restore as Figures

SAVES = 3
TOUCHED = 4  # times the state


def measure(contender: str, job: Job, log: Path) -> list[Figures]:
    """Save, restore cold and warm, train on, kill, restore. Raises ToolError."""
    with worker(job.workload, contender, log) as saver:
        saver.ask(Attach(job), Done)
        for _ in range(SAVES):
            saved = saver.ask(SaveOne(), Saved)
        state_bytes = saver.ask(Detach(), Done).state_bytes
    figures = []
    for case in ("cold", "warm"):
        with worker(job.workload, contender, log) as fresh:
            start_s = _built(fresh)
            touch(TOUCHED * state_bytes)
            if case == "cold":
                forget(job.folder)
            figures.append(_restored(fresh, contender, job, case, start_s, saved.iteration, saved.digest))
    expected = _killed_while_training(contender, job, log)
    with worker(job.workload, contender, log) as fresh:
        touch(TOUCHED * state_bytes)  # while it imports: a tool that goes on in the background is given no time
        figures.append(_restored(fresh, contender, job, "killed", _built(fresh), expected, None))
    return figures


def _built(fresh: Process) -> float:
    fresh.ask(Build(), Done)
    return time.monotonic() - fresh.started


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


def _restored(
    fresh: Process, contender: str, job: Job, case: str, start_s: float, expected: int, digest: str | None
) -> Figures:
    fresh.ask(Attach(job), Done)
    restored = fresh.ask(Restore(), Restored)
    return Figures(
        workload=job.workload,
        contender=contender,
        tier=job.tier,
        case=case,
        start_s=start_s,
        attach_s=restored.attach_s,
        restore_s=restored.restore_s,
        iteration=restored.iteration,
        expected=expected,
        exact=None if digest is None else restored.digest == digest,
    )


def touch(size_bytes: int) -> None:
    """Use free memory and let it go again. A hypervisor may have taken back what was free, and whoever came next would
    pay for that: 2.3 s for each GB where this was written, six times what reading as much from the disk takes.
    """
    mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def forget(folder: Path) -> None:
    """Drop the files from the page cache. The program's own files stay there."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
