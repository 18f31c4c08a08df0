"""Directories that are read and not written to, as those of another number of ranks: first their savers end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from checkflow.distributed.group import Group
from checkflow.store.both.lock import await_writer, writer_of


def await_writers(group: Group | None, directories: Iterable[Path], tell: Callable[[str], None]) -> None:
    """Wait until no killed trainer's saver writes to any of these: what it still has may be the newest.

    Every rank calls this; of those that see a saver the first tells of it. Raises StoreBusyError where a trainer
    writes to one.
    """
    lines = {str(path): line for path in directories if (line := writer_of(path))}
    said = [list(lines)] if group is None else group.gather("attach() or restore()", list(lines))
    before = {path for each in said[: 0 if group is None else group.rank] for path in each}  # type: ignore[attr-defined]
    for line in (line for path, line in lines.items() if path not in before):
        tell(line)
    for path in lines:
        await_writer(Path(path))
