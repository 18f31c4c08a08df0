"""Who is killed, and how."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from random import Random

from peering.processes import kill_all, tree

from .bench import Life

Strike = Callable[[Life, Random], None]


def trainer(life: Life, _: Random) -> None:
    life.forked.send(signal.SIGKILL)


def group(life: Life, _: Random) -> None:
    """The trainer's process group; its saver has one of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(life.forked.pid, signal.SIGKILL)


def saver(life: Life, _: Random) -> None:
    for pid in tree(life.forked.pid)[1:]:
        _kill(pid)


def everything(life: Life, _: Random) -> None:
    """At once: none sees another die, as when a control group or a machine ends."""
    if life.forked.code() is None:
        kill_all(life.forked.pid)


def out_of_memory(life: Life, chance: Random) -> None:
    """One after the other in any order without a pause, as memory.oom.group does."""
    pids = tree(life.forked.pid)
    chance.shuffle(pids)
    for pid in pids:
        _kill(pid)


def saver_first(life: Life, chance: Random) -> None:
    """The saver, and shortly after it the trainer."""
    saver(life, chance)
    time.sleep(chance.uniform(0.0, 0.03))
    trainer(life, chance)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


ALONE: dict[str, Strike] = {"trainer": trainer, "trainer's group": group}
ALL: dict[str, Strike] = {"everything": everything, "out of memory": out_of_memory, "saver, then trainer": saver_first}
