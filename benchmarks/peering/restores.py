"""From a new process's start to the restored model: files not in memory, in memory, after a killed trainer."""

from __future__ import annotations

import dataclasses
import mmap
import os
import statistics
import time
from pathlib import Path

from contenders import Job

from .orders import Attach, Build, Detach, Done, Restore, Restored, Saved, SaveOne, Train, Turn
from .processes import Process, worker
from .results import Restore as Figures

SAVES = 3
REPEATS = 3  # an odd number has a median
KEPT = 4  # times the state


def measure(contender: str, job: Job, log: Path) -> list[Figures]:
    """Save, restore cold and warm, train on, kill, restore, each REPEATS times. Raises ToolError."""
    with worker(job.workload, contender, log) as saver:
        saver.ask(Attach(job), Done)
        for _ in range(SAVES):
            saved = saver.ask(SaveOne(), Saved)
        state_bytes = saver.ask(Detach(), Done).state_bytes
    runs: dict[str, list[Figures]] = {"cold": [], "warm": [], "killed": []}
    for case in ("cold", "warm") * REPEATS:
        with worker(job.workload, contender, log) as fresh:
            start_s = _built(fresh)
            if case == "cold":
                forget(job.folder)
            else:
                remember(job.folder)
            keep(KEPT * state_bytes).close()
            runs[case].append(_restored(fresh, contender, job, case, start_s, saved.iteration, saved.digest))
    for _ in range(REPEATS):
        memory = keep(KEPT * state_bytes)  # long before the kill: a tool's background is given no time by it
        expected = _killed_while_training(contender, job, log)
        with worker(job.workload, contender, log) as fresh:
            start_s = _built(fresh)
            memory.close()
            runs["killed"].append(_restored(fresh, contender, job, "killed", start_s, expected, None))
    return [_median(each) for each in runs.values()]


def _median(runs: list[Figures]) -> Figures:
    """The run of median time in the tool, the others' beside it, and what went wrong in any of them."""
    ordered = sorted(runs, key=lambda run: run.tool_s)
    return dataclasses.replace(
        ordered[len(runs) // 2],
        start_s=statistics.median(run.start_s for run in runs),
        repeats_s=tuple(run.tool_s for run in ordered),
        exact=None if runs[0].exact is None else all(run.exact for run in runs),
    )


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


def keep(size_bytes: int) -> mmap.mmap:
    """Memory in use until it is closed, then free for whoever comes next, at once.

    What is free for two seconds a hypervisor may take back; its next use cost 2.3 s for each GB where this was written,
    six times what reading as much from the disk takes.
    """
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def forget(folder: Path) -> None:
    """Drop the files from the page cache. The program's own files stay there."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def remember(folder: Path) -> None:
    """Bring the files into the page cache, whichever way the tool read or wrote them."""
    room = bytearray(2**20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(room):
                    pass
