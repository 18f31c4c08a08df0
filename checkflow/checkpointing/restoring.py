"""What is found to restore, by one process or by all ranks of a training; and why no step is taken before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkflow.checkpointing.behind_one import BehindOne
from checkflow.errors import CorruptStoreError
from checkflow.state.host.record import Record
from checkflow.state.restore import read
from checkflow.state.restore.files import TensorFile
from checkflow.store.format.manifest import parse_directory_name
from checkflow.store.format.reader import Checkpoint, SkippedCheckpoint, checkpoint_names, load_newest

_NAMED = 5  # checkpoints, in a message


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was read, of several ranks this one's part of it; and why newer ones were skipped."""

    files: Mapping[str, TensorFile]
    record: Record
    checkpoint: Checkpoint
    skipped: tuple[SkippedCheckpoint, ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """There is none yet; `skipped`: what this rank has a part of, and others have not."""

    skipped: tuple[SkippedCheckpoint, ...]


def iterations_in(stores: Iterable[Path]) -> list[int]:
    """Of the checkpoints that there are, sound or not, newest first."""
    names = (name for store in stores for name in checkpoint_names(store))
    return sorted({found.iteration for name in names if (found := parse_directory_name(name))}, reverse=True)


def newest_in(store: Path, iteration: int | None) -> Found | Nothing:
    """Of one process. Raises as `load_newest` and `read` do."""
    found = load_newest(store, iteration)
    if found.loaded is None:
        return Nothing(found.skipped)
    checkpoint = found.loaded.checkpoint
    files, record = read(found.loaded.files, found.loaded.record, checkpoint.iteration)
    return Found(files, record, checkpoint, found.skipped)


def newest_of(behind: BehindOne, store: Path, iteration: int | None) -> Found | Nothing:
    """The same where a bucket is behind the store: what is newer there, or verifies only there, is downloaded first."""
    behind.bring(iteration, behind.newest_here(iteration))
    try:
        found = newest_in(store, iteration)
    except CorruptStoreError:
        if not behind.bring(iteration, None):
            raise
        return newest_in(store, iteration)
    if found.skipped and isinstance(found, Found) and behind.bring(iteration, found.checkpoint.manifest):
        return newest_in(store, iteration)
    return found


def overrun(left: Iterable[tuple[str, Callable[[], list[int]]]]) -> str:
    """Why no step is taken: what an earlier run left would be pruned, if it is not resumed. "" where there is nothing.

    `left`: places, in the order in which they are looked at, and the iterations that are found there.
    """
    where, found = next(((where, found) for where, find in left if (found := find())), ("", []))
    if not found:
        return ""
    named = ", ".join(map(str, found[:_NAMED]))
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"{where} holds checkpoints of iterations {named}{more}, and nothing was restored; call restore() first, or "
        "attach(..., start_over=True) to begin anew beside them"
    )
