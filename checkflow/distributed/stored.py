"""Which checkpoints of a training in several processes a bucket has parts of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkflow.distributed.marks import Mark, age
from checkflow.errors import CorruptStoreError, FormatError
from checkflow.state.host.record import parse_record
from checkflow.store.bucket.download import read_record
from checkflow.store.bucket.names import by_rank, read_manifest, serial_of
from checkflow.store.bucket.objects import Objects
from checkflow.store.format.manifest import Manifest
from checkflow.store.format.ranks import directory_of


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rank's part of a checkpoint: its name below `objects`, and the sizes in bytes of what is there of it."""

    objects: Objects
    name: str
    sizes: Mapping[str, int]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class StoredParts:
    """What there is of a checkpoint of so many processes, by rank; not all of it maybe."""

    mark: Mark
    processes: int
    ranks: Mapping[int, StoredPart]

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.processes


def parts_in(objects: Objects, sizes: Mapping[str, int], tell: Callable[[str], None]) -> list[StoredParts]:
    """All that objects of these sizes are parts of, newest first; what is no part of anything is told.

    Raises BucketError.
    """
    found: dict[tuple[Mark, int], dict[int, StoredPart]] = {}
    for (rank, processes), contents in by_rank(sizes).items():
        own = objects if processes == 1 else objects.below(directory_of(rank, processes))
        for name in contents.newest_first:
            its = contents.checkpoints[name]
            try:
                part = StoredPart(own, name, its, read_manifest(own, name, its))
                mark = mark_of(own, name, part.manifest, processes=processes)
            except CorruptStoreError as error:
                tell(f"{own.url}: {name}: {error}")
                continue
            found.setdefault((mark, processes), {}).setdefault(rank, part)
    return sorted((StoredParts(*key, ranks) for key, ranks in found.items()), key=_age, reverse=True)


def _age(parts: StoredParts) -> tuple[tuple[int, int, int], int]:
    return age(parts.mark, max(serial_of(part.name) for part in parts.ranks.values())), parts.processes


def mark_of(objects: Objects, name: str, manifest: Manifest, *, processes: int) -> Mark:
    """Of the checkpoint of this name, of a training in so many.

    What one process took before there were several has attempt 0. Raises CorruptStoreError where its record does not
    say it, BucketError.
    """
    try:
        record = parse_record(read_record(objects, name, manifest))
    except FormatError as error:
        raise CorruptStoreError(str(error)) from None
    if record.member is not None:
        return Mark(record.member.attempt, record.iteration)
    if processes > 1:
        raise CorruptStoreError(f"is of one process, among those of {processes}")
    return Mark(0, record.iteration)
