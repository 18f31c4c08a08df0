"""A forked trainer that is going to be killed, and the page on which it says how far it is.

Forked from a worker that has imported everything, so that a life costs milliseconds and not seconds.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from contenders import Contender, Job

from .session import Session
from .workloads import WORKLOADS

PAGE = struct.Struct("<qqqqq")
UNKNOWN, REFUSED = -1, -2


@dataclass(frozen=True, slots=True)
class Entry:
    """`restored` is UNKNOWN until it is known, and REFUSED where nothing could be loaded.

    Only trainings that are tortured note `phase`, what they do, and `durable`, the iteration that they were told of.
    """

    pid: int = 0
    restored: int = UNKNOWN
    completed: int = 0
    phase: int = 0
    durable: int = 0


class Diary:
    """Shared by the driver and the life, through a file; what is written is there whenever the life is killed."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(PAGE.size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE.size)

    def write(self, entry: Entry) -> None:
        self._page[:] = PAGE.pack(entry.pid, entry.restored, entry.completed, entry.phase, entry.durable)

    def note(self, completed: int) -> None:
        """One aligned store."""
        self._page[16:24] = struct.pack("<q", completed)

    def note_phase(self, phase: int) -> None:
        self._page[24:32] = struct.pack("<q", phase)

    def note_durable(self, durable: int) -> None:
        self._page[32:40] = struct.pack("<q", durable)

    def read(self) -> Entry:
        return Entry(*PAGE.unpack(self._page))


def live(workload: str, kind: type[Contender], job: Job, path: Path) -> None:
    """Returns when the child is dead."""
    diary = Diary(path)
    diary.write(Entry())
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        diary.write(Entry(os.getpid()))
        training = WORKLOADS[workload].build()
        session = Session(kind, job, training)
        try:
            restored = session.restore().iteration
        except Exception:  # noqa: BLE001 (a tool that cannot restore is a result)
            traceback.print_exc()
            diary.write(Entry(os.getpid(), REFUSED))
            os._exit(0)
        diary.write(Entry(os.getpid(), restored, restored))
        while True:
            session.iterate(diary.note)
    except BaseException:  # noqa: BLE001 (a fork must not return into the worker)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
