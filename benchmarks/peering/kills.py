"""Iterations lost when a trainer with a checkpoint at every iteration is killed at a random moment.

In memory: SIGKILL of the trainer alone, whose helpers and files in memory live on. On disk: of the trainer and of
everything it started, as when a container ends. Neither is a power cut: what is only in the page cache survives here.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from contenders import Job, Tier

from .lives import UNKNOWN, Diary, Entry
from .orders import Done, Live
from .processes import Process, ToolError, kill_all, tree
from .results import Kills

SETTLED = 5  # iterations after which a life may end: what the tool starts at its first save has started
LONGEST_S = 0.3  # from then to the kill
PATIENCE_S = 60.0


def measure(contender: str, job: Job, log: Path, kills: int, seed: int = 0) -> Kills:
    """One life after the other in the same folder. Raises ToolError where one does not come to train."""
    chance = random.Random(seed)
    diary_path = job.prepared / "diary"
    process = Process(job.workload, contender, log)
    lost, completed, refused, left = [], [], 0, []
    try:
        before = 0
        for _ in range(2 * kills + 1):  # those after a life that could not go on start anew and lose nothing
            diary_path.unlink(missing_ok=True)
            diary = Diary(diary_path)
            process.tell(Live(job, diary_path))
            entry = _until(diary, process, _knows)
            if before:
                lost.append(max(0, before - max(0, entry.restored)))  # killed after a save and before its note: none
            if len(lost) == kills:
                left += _kill(entry.pid, job.tier)
                break
            began = max(0, entry.restored)
            entry = _until(diary, process, partial(_settled, began))
            if _settled(began, entry):
                time.sleep(chance.uniform(0.0, LONGEST_S))
                left += _kill(entry.pid, job.tier)
                before = diary.read().completed
                completed.append(before - began)
            else:  # nothing could be restored, or the resumed training could not be saved
                refused += 1
                before = 0
            process.hear(Done, PATIENCE_S)
            if not before:
                _clear(job.folder)
    finally:
        kill_all(process.pid)
        process.end()
        _bury(left)
    return Kills(contender, job.tier, tuple(lost), tuple(completed), refused, job.workload)


def _until(diary: Diary, process: Process, ready: Callable[[Entry], bool]) -> Entry:
    """What the diary says when it is ready, or when the life has ended by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        entry = diary.read()
        if entry.pid and ready(entry):
            return entry
        if process.answered(0.001):
            return diary.read()
    raise ToolError(f"the training hangs at {diary.read()}")


def _knows(entry: Entry) -> bool:
    return entry.restored != UNKNOWN


def _settled(began: int, entry: Entry) -> bool:
    return entry.completed >= began + SETTLED


def _kill(pid: int, tier: Tier) -> list[int]:
    """Returns pidfds of what it started and is left."""
    helpers = []
    for helper in tree(pid)[1:]:
        with contextlib.suppress(ProcessLookupError):
            helpers.append(os.pidfd_open(helper))
    if tier is Tier.DISK:
        kill_all(pid)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return helpers


def _bury(helpers: list[int]) -> None:
    """Most end by themselves once their trainer is dead."""
    for helper in helpers:
        if not select.select([helper], [], [], 5.0)[0]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(helper, signal.SIGKILL)
        os.close(helper)


def _clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
