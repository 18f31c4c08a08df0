"""What a run works with: a folder of its own, the schedule, the oracle, and lives."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forked import INTERNAL, Forked
from peering.lives import Diary, Entry
from peering.processes import tree

from checkflow.store.format.reader import Checkpoint, list_checkpoints, load_newest

from .oracle import Oracle
from .settings import SETTINGS, Setting
from .trainer import Phase, Plan, live

HANG_S = 60.0
LEFTOVERS = (".incomplete-", ".pruned-")
PR_SET_CHILD_SUBREAPER = 36


class Life:
    """A training in a forked process, seen from outside."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        folder.mkdir(parents=True)
        path = folder / "diary"
        self.plan = plan
        self.diary = Diary(path)
        self.forked = Forked(lambda: live(plan, path), folder)

    def entry(self) -> Entry:
        return self.diary.read()

    def until(self, ready: Callable[[Entry], bool], timeout_s: float = HANG_S) -> bool:
        """Whether it came so far; False where it ended before or does not move."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if ready(self.entry()):
                return True
            if self.forked.code() is not None:
                return ready(self.entry())
            time.sleep(0.0003)
        return False

    def came_to(self, phase: Phase) -> bool:
        return self.until(lambda entry: entry.phase >= phase)

    def completed(self, more: int) -> bool:
        """Whether so many iterations are completed after what was restored."""
        return self.until(lambda entry: entry.phase >= Phase.TRAINING and entry.completed >= entry.restored + more)

    @property
    def phase(self) -> Phase:
        return Phase(self.entry().phase)

    def said(self) -> list[tuple[int, str]]:
        words = [line.split() for line in self.forked.said() if line.startswith("at ")]
        return [(int(iteration), content) for _, iteration, content in words]

    def trouble(self) -> tuple[str, str]:
        """How it ended, where not well and not by a signal: (a CheckflowError's line, the last line of a traceback)."""
        lines = [line for line in self.forked.complaint().splitlines() if line.strip()]
        last = lines[-1][:400] if lines else ""
        code = self.forked.code()
        if code == INTERNAL:
            return "", last
        return (last, "") if code is not None and code > 0 else ("", "")


@dataclass
class Bench:
    """One run's."""

    folder: Path
    schedule: Path
    oracle: Oracle
    short: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def plan(self, setting: Setting = SETTINGS[0]) -> Plan:
        return Plan(self.schedule, self.store, setting)

    def live(self, plan: Plan) -> Life:
        return Life(plan, self.folder / f"life-{next(self._numbers)}")

    def differs(self, life: Life) -> str:
        """What of the states that it said is not the oracle's; nothing is compared before the first iteration."""
        for iteration, content in life.said():
            if iteration and self.oracle.digest(iteration) != content:
                return f"the state of iteration {iteration} differs from the uninterrupted run's"
        return ""

    def finish(self, plan: Plan, *, at_least: int = 0) -> str:
        """A life to which nothing happens: it resumes, trains a little and closes. What was wrong with that."""
        life = self.live(plan)
        code = life.forked.wait(HANG_S)
        hangs_at = life.phase
        life.forked.end()
        if not self.alone():
            return "a process is left after a training was closed"
        if code is None:
            return f"resuming hangs while {hangs_at.name.lower()}"
        if code != 0:
            return f"resuming ended with {code}: {''.join(life.trouble())}"
        said = life.said()
        if said[0][0] < at_least:
            return f"iteration {at_least} was durable, {said[0][0]} restored"
        return self.differs(life) or left_behind(plan.store, said[-1][0])

    def restorable(self) -> int:
        """The iteration of the newest checkpoint that verifies, 0 without one; of a store that nobody writes to."""
        loaded = load_newest(self.store).loaded if self.store.exists() else None
        return 0 if loaded is None else loaded.checkpoint.iteration

    def alone(self, timeout_s: float = HANG_S) -> bool:
        """Whether all processes that the run's ended ones started, savers above all, end in this time."""
        deadline = time.monotonic() + timeout_s
        while any(orphans(self.oracle.pid)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def adopt_orphans() -> None:
    """What a killed training started becomes a child of this process, and so is seen."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def orphans(*own: int) -> Iterator[int]:
    """Children of this process that live, but for its own. The dead are buried."""
    for pid in tree(os.getpid())[1:]:
        if pid in own:
            continue
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
        if Path(f"/proc/{pid}").exists():
            yield pid


def left_behind(store: Path, newest: int) -> str:
    """What is wrong with a store that was closed at this iteration."""
    found = [each.iteration for each in list_checkpoints(store) if isinstance(each, Checkpoint)]
    if not found or found[0] != newest:
        return f"closed at iteration {newest}, the store holds {found}"
    remains = [path.name for path in store.iterdir() if path.name.startswith(LEFTOVERS)]
    return f"{remains} was left in the store" if remains else ""
