"""What earlier jobs left where no checkpoint is whole: nothing that can be lost, or parts of what may have been whole.

A job whose ranks were killed before each had its first checkpoint leaves a directory of every rank, for all made theirs
before any trained, and no checkpoint of which each has a part. Where a rank's directory is gone nobody can know that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkflow.distributed.marks import Mark, common
from checkflow.distributed.parts import marks_in, unread_in
from checkflow.store.format.ranks import directory_of, parse_directory, ranks_have, ranks_in
from checkflow.store.format.reader import SkippedCheckpoint


@dataclass(frozen=True, slots=True)
class Remains:
    """Of a job of `size` processes: what each has, by rank that has a directory anywhere."""

    size: int
    marks: Mapping[int, frozenset[Mark]]
    has_unread: bool  # checkpoints, of which nobody can tell what they are

    def may_have_been_whole(self, size: int) -> bool:
        """Whether a job of `size` processes that begins anew may lose something."""
        if self.has_unread or not any(self.marks.values()):
            return self.has_unread
        is_whole_elsewhere = self.size != size and bool(common(list(self.marks.values())))  # in several places
        return len(self.marks) < self.size or is_whole_elsewhere

    @property
    def why(self) -> str:
        """None is whole."""
        lacking = [rank for rank, marks in sorted(self.marks.items()) if not marks]
        return f"{ranks_have(lacking)} no checkpoint" if lacking else "not every rank has a part of it"


def seen_here(root: Path, size: int, before: Collection[int]) -> list[object]:
    """The directories of ranks that can be seen, as JSON; of this job's own number those that were there `before`."""
    found: list[object] = []
    for number, ranks in ranks_in(root).items():
        for rank in ranks:
            if number != size or rank in before:
                directory = root / directory_of(rank, number)
                found.append([directory.name, list(marks_in(directory)), bool(unread_in(directory, 0))])
    return found


def remains_of(said: Iterable[object]) -> list[Remains]:
    """By what each rank has seen, for each number of processes."""
    marks: dict[int, dict[int, frozenset[Mark]]] = {}
    unread: set[int] = set()
    for name, found, has_unread in (each for seen in said for each in seen):  # type: ignore[attr-defined]
        if (parsed := parse_directory(name)) is not None:
            rank, size = parsed
            of_size = marks.setdefault(size, {})
            of_size[rank] = of_size.get(rank, frozenset()).union(Mark(*mark) for mark in found)
            unread |= {size} if has_unread else set()
    return [Remains(size, of_size, size in unread) for size, of_size in sorted(marks.items())]


def named(root: Path, said: list[object], rank: int, remains: Iterable[Remains]) -> Iterator[SkippedCheckpoint]:
    """What is left aside: each part, by the first rank that sees it."""
    why = {each.size: each.why for each in remains}
    before = {name for seen in said[:rank] for name, _, _ in seen}  # type: ignore[attr-defined]
    for name, _, _ in said[rank]:  # type: ignore[attr-defined]
        if name not in before and (parsed := parse_directory(name)) is not None:
            for part in marks_in(root / name).values():
                each = part.checkpoint
                yield SkippedCheckpoint(each.path, each.serial, each.iteration, f"{name}: {why[parsed[1]]}")
