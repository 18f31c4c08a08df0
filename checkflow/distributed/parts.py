"""A checkpoint of a training in several processes, on a disk that has every rank's part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from checkflow.distributed.marks import Mark, age, common
from checkflow.errors import CorruptStoreError, FormatError
from checkflow.state.host.record import Record, parse_record
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.match import files_of
from checkflow.state.restore.rebuild import brought_together
from checkflow.store.format.manifest import RECORD, parse_directory_name
from checkflow.store.format.ranks import directory_of, noted_whole, ranks_have, ranks_in
from checkflow.store.format.reader import (
    Checkpoint,
    SkippedCheckpoint,
    checkpoint_names,
    examine,
    nothing_is_scarce,
    read_file,
)


@dataclass(frozen=True)
class RankPart:
    """A rank's; its manifest and its record are sound, which says nothing of its other files."""

    checkpoint: Checkpoint
    record: Record

    @property
    def mark(self) -> Mark:
        """What one process took before there were several has attempt 0."""
        return Mark(0 if self.record.member is None else self.record.member.attempt, self.record.iteration)

    @cached_property
    def brought_together(self) -> Mapping[str, TensorFile]:
        """The files of one in parts as if it had left in one: its updates are made again on the host, once.

        Raises CorruptStoreError, FormatError, InputError where only its training can do that, StoreError where
        something is scarce.
        """
        return brought_together(self.record, self.gathered())

    def gathered(self) -> dict[str, TensorFile]:
        """Its files as they were saved, those of lanes as one. Raises CorruptStoreError, FormatError, StoreError."""
        files = {entry.name: self.read(entry.name) for entry in self.checkpoint.manifest.tensor_files}
        return files_of(self.record, files)

    def read(self, name: str) -> memoryview:
        """A file of it, verified, whatever it has. Raises CorruptStoreError, StoreError where something is scarce."""
        try:
            with nothing_is_scarce(self.checkpoint.path):
                return read_file(self.checkpoint, name)
        except CorruptStoreError as error:
            whose = f"{self.checkpoint.path.parent.name}/" if self.record.member is not None else ""
            raise CorruptStoreError(f"{whose}{error}") from None


@dataclass(frozen=True, slots=True)
class Complete:
    """Of every rank, by rank. Of a training in one process it is that process's checkpoint."""

    mark: Mark
    ranks: tuple[RankPart, ...]

    @property
    def size(self) -> int:
        """Processes that trained."""
        return len(self.ranks)


def marks_in(store: Path) -> dict[Mark, RankPart]:
    """A rank's checkpoints that say which they are part of; of several of one mark the newest."""
    found: dict[Mark, RankPart] = {}
    for part in _parts_in(store):
        if part.record.member is not None:
            found.setdefault(part.mark, part)
    return found


def all_in(store: Path, *, but: int = 0) -> list[Complete]:
    """The checkpoints of which every rank's part is there, newest first, of however many processes.

    `but`: leave out those of so many. What one process took before there were several counts as older than all of
    theirs. Raises StoreError.
    """
    first: dict[Mark, Complete] = {}
    for part in _parts_in(store):
        if part.record.member is None or but != 1:
            first.setdefault(part.mark, Complete(part.mark, (part,)))
    found = list(first.values())
    for size, ranks in ranks_in(store).items():
        if len(ranks) == size != but:
            held = [marks_in(store / directory_of(rank, size)) for rank in ranks]
            found += [Complete(mark, tuple(marks[mark] for marks in held)) for mark in common(held)]
    return sorted(found, key=lambda parts: age(parts.mark, parts.ranks[0].checkpoint.serial), reverse=True)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What there is of a checkpoint of `size` processes: the parts by rank, not all of them maybe."""

    mark: Mark
    size: int
    ranks: Mapping[int, RankPart]


def gathered_in(store: Path) -> list[Gathered]:
    """Each checkpoint of which any rank has a part, newest first. Raises StoreError."""
    found: dict[tuple[Mark, int], dict[int, RankPart]] = {}
    for size, ranks in ranks_in(store).items():
        for rank in ranks:
            for mark, part in marks_in(store / directory_of(rank, size)).items():
                found.setdefault((mark, size), {})[rank] = part
    alone = {parts.mark: parts.ranks[0] for parts in all_in(store) if parts.size == 1}
    for mark, part in alone.items():
        found.setdefault((mark, 1), {})[0] = part
    gathered = [Gathered(mark, size, parts) for (mark, size), parts in found.items()]
    return sorted(gathered, key=_age, reverse=True)


def _age(parts: Gathered) -> tuple[tuple[int, int, int], int]:
    return age(parts.mark, max(part.checkpoint.serial for part in parts.ranks.values())), parts.size


def directories_in(store: Path, *, but: int) -> list[Path]:
    """Of ranks, and of one process, that have checkpoints, sound or not; not those of trainings in so many."""
    found = places_in(store, but=but)
    return [directory for directory in found if directory.exists() and checkpoint_names(directory)]


def places_in(store: Path, *, but: int) -> list[Path]:
    """The same, whether they have any yet or not."""
    ranks = ranks_in(store).items()
    found = [store / directory_of(rank, size) for size, each in ranks if size != but for rank in each]
    return [store, *found] if but != 1 else found


def newest_part(directory: Path) -> RankPart | None:
    """What was written last there. Raises StoreError."""
    return next(_parts_in(directory), None)


def noted_in(store: Path, *, of: tuple[int, Collection[int]] | None = None) -> dict[tuple[Mark, int], frozenset[int]]:
    """Checkpoints, with their number of ranks, of which all once had their parts on disk -> the ranks that have, here.

    As the directories of ranks have noted it, each its newest. `of`: how many ranks there are, and of whose directories
    of so many alone is looked at. Raises StoreError.
    """
    found: dict[tuple[Mark, int], frozenset[int]] = {}
    for size, everyone in ranks_in(store).items():
        ranks = [rank for rank in everyone if of is None or of[0] != size or rank in of[1]]
        serials = {rank: noted_whole(store / directory_of(rank, size)) for rank in ranks}  # before any part is pruned
        held = {rank: marks_in(store / directory_of(rank, size)) for rank in ranks}
        for rank, parts in held.items():
            for mark in [mark for mark, part in parts.items() if part.checkpoint.serial == serials[rank]]:
                found[mark, size] = frozenset(other for other, marks in held.items() if mark in marks)
    return found


def lost_in(store: Path, after: Mark) -> list[SkippedCheckpoint]:
    """What is newer than this one, of which every rank once had its part on disk, and not all parts are there now."""
    noted = noted_in(store).items()
    return [lost(store, mark, size, ranks) for (mark, size), ranks in noted if mark > after and len(ranks) < size]


def lost(store: Path, mark: Mark, size: int, ranks: Collection[int]) -> SkippedCheckpoint:
    """One of so many ranks, of which these are known to have their parts."""
    lacking = sorted(set(range(size)).difference(ranks))
    why = f"{ranks_have(lacking)} no part of it any more" if lacking else "its parts are not in one place any more"
    path = store / f"iteration {mark.iteration} of attempt {mark.attempt}"
    return SkippedCheckpoint(path, 0, mark.iteration, why)


def newest_mark(store: Path) -> Mark | None:
    """The latest of which any rank has a part, of each directory only the newest being read; of an iteration that is no
    less than that of any directory, whether it can be read or not. Raises StoreError."""
    ranks = [store / directory_of(rank, size) for size, found in ranks_in(store).items() for rank in found]
    found: list[Mark] = []
    for directory in (store, *ranks):
        part = newest_part(directory)
        unread = unread_in(directory, 0 if part is None else part.checkpoint.serial)
        found += [Mark(0 if part is None else part.mark.attempt, each.iteration) for each in unread]
        found += [] if part is None else [part.mark]
    return max(found, default=None)


def unread_in(store: Path, after: int) -> list[SkippedCheckpoint]:
    """What there is in a rank's directory after this serial whose manifest or record is not what was written.

    Raises StoreError, FormatError for a record of another version.
    """
    found: list[SkippedCheckpoint] = []
    for name in checkpoint_names(store) if store.exists() else ():
        parsed = parse_directory_name(name)
        if parsed is None or parsed.serial <= after:
            break
        try:
            part = _part_of(store, name)
        except FormatError as error:
            raise FormatError(f"{store / name}: {error}") from None
        if isinstance(part, SkippedCheckpoint):
            found.append(part)
    return found


def _parts_in(store: Path) -> Iterator[RankPart]:
    """Newest first."""
    for name in checkpoint_names(store) if store.exists() else ():
        try:
            part = _part_of(store, name)
        except FormatError:  # no part of anything
            continue
        if isinstance(part, RankPart):
            yield part


def _part_of(store: Path, name: str) -> RankPart | SkippedCheckpoint:
    """By the name of its directory. Raises StoreError where something is scarce, FormatError as `parse_record` does."""
    with nothing_is_scarce(store):
        checkpoint = examine(store, name)
        if isinstance(checkpoint, SkippedCheckpoint):
            return checkpoint
        try:
            record = parse_record(bytes(read_file(checkpoint, RECORD)))
            if record.iteration == checkpoint.iteration:
                return RankPart(checkpoint, record)
            why = f"its record is of iteration {record.iteration}"
        except CorruptStoreError as error:
            why = str(error)
    return SkippedCheckpoint(checkpoint.path, checkpoint.serial, checkpoint.iteration, why)
