"""From a new process's start to the restored model: files not in memory, in memory, after a killed trainer."""

from __future__ import annotations

import dataclasses
import mmap
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from contenders import Job

from .orders import Attach, Build, Detach, Done, Restore, Restored, Saved, SaveOne, Train, Turn
from .processes import Process, worker
from .results import Restore as Figures

Case = Literal["cold", "warm", "killed"]
SAVES = 3
KEPT, KEPT_BYTES = 4, 2**28  # times the state, and at least


def cases(repeats: int) -> Sequence[Case]:
    """In which order; what a killed training leaves comes last, since it has trained on."""
    saved: tuple[Case, ...] = ("cold", "warm")
    killed: tuple[Case, ...] = ("killed",)
    return repeats * saved + repeats * killed


class Kept:
    """Memory in use, but given free for whoever comes next, in the pages it was taken in: huge ones where there are.

    What is free for two seconds a hypervisor may take back; its next use cost 2.3 s for each GB where this was written,
    six times what reading as much from the disk takes. It takes back what is free in pieces of 2 MiB, which huge pages
    are made of first: memory that is kept in small ones leaves those to be met by who asks for huge ones.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._memory: mmap.mmap | None = None

    def take(self) -> None:
        """Nothing where it is taken."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory[:: mmap.PAGESIZE] = bytes(len(range(0, self._size_bytes, mmap.PAGESIZE)))  # a touch of each

    def give(self) -> None:
        """At once."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Candidate:
    """A contender with checkpoints to be restored."""

    def __init__(self, contender: str, job: Job, log: Path) -> None:
        """Save SAVES times. Raises ToolError, as all of these."""
        self.contender = contender
        self._job = job
        self._log = log
        self._runs: dict[Case, list[Figures]] = {"cold": [], "warm": [], "killed": []}
        with worker(job.workload, contender, log) as saver:
            saver.ask(Attach(job), Done)
            for _ in range(SAVES):
                self._saved = saver.ask(SaveOne(), Saved)
            self.state_bytes = saver.ask(Detach(), Done).state_bytes
        forget(job.folder)

    def restore(self, case: Case, kept: Kept) -> None:
        """Once, in a new process, or after the kill of a trainer."""
        kept.take()  # long before a kill: a tool's background is given no time by it
        expected = self._killed_while_training() if case == "killed" else self._saved.iteration
        with worker(self._job.workload, self.contender, self._log) as fresh:
            fresh.ask(Build(), Done)
            start_s = time.monotonic() - fresh.started
            if case == "cold":
                forget(self._job.folder)
            elif case == "warm":
                remember(self._job.folder)
            kept.give()
            fresh.ask(Attach(self._job), Done)
            restored = fresh.ask(Restore(), Restored)
        kept.take()  # before it is taken back
        forget(self._job.folder)  # the next one's files find room
        self._runs[case].append(
            Figures(
                workload=self._job.workload,
                contender=self.contender,
                tier=self._job.tier,
                case=case,
                start_s=start_s,
                attach_s=restored.attach_s,
                restore_s=restored.restore_s,
                iteration=restored.iteration,
                expected=expected,
                exact=None if case == "killed" else restored.digest == self._saved.digest,
            )
        )

    def figures(self) -> list[Figures]:
        """Of each case the run of median time in the tool."""
        return [_median(runs) for runs in self._runs.values() if runs]

    def _killed_while_training(self) -> int:
        """SIGKILL of the trainer alone, in the middle of an iteration; how many it had completed."""
        victim = Process(self._job.workload, self.contender, self._log)
        try:
            victim.ask(Attach(self._job), Done)
            restored = victim.ask(Restore(), Restored)
            turn = victim.ask(Train(2), Turn)
            victim.tell(Train(1000))
            time.sleep(turn.times_s[-1] * 0.5)
        finally:
            victim.kill_trainer()
        return restored.iteration + len(turn.times_s)


def _median(runs: list[Figures]) -> Figures:
    """The run of median time in the tool, the others' beside it, and what went wrong in any of them."""
    ordered = sorted(runs, key=lambda run: run.tool_s)
    return dataclasses.replace(
        ordered[len(runs) // 2],
        start_s=statistics.median(run.start_s for run in runs),
        repeats_s=tuple(run.tool_s for run in ordered),
        exact=None if runs[0].exact is None else all(run.exact for run in runs),
    )


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
