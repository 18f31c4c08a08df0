"""What lies in a bucket, as the names of its objects say: checkpoints, attempts, and what nobody finished.

    00000003.attempt                        the third run that uploads here, and who it is
    30000012-iteration-340/model.safetensors    its twelfth checkpoint: the same files as on disk
    30000012-iteration-340/manifest.json    with this serial, the last one: without it there is no checkpoint
    written                                 something was uploaded: last of all names, so a whole listing shows it
    rank-3-of-8/00000003.attempt            where several processes train, the same for each below its directory's name
    rank-3-of-8/whole                       each of them once had its part of a checkpoint there

A serial is of one attempt alone, and an attempt of one run. So no two ever put objects of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from checkflow.errors import CorruptStoreError
from checkflow.jsonfile import digest_of
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.manifest import (
    KEPT,
    MANIFEST,
    MAX_SERIAL,
    Manifest,
    directory_name,
    max_manifest_bytes,
    parse_directory_name,
    parse_manifest,
)
from checkflow.store.format.ranks import WHOLE, parse_directory

UPLOADS = 10**7  # serials of one attempt
ATTEMPTS = MAX_SERIAL // UPLOADS
_ATTEMPT = re.compile(r"(\d{8})\.attempt")


@dataclass(frozen=True, slots=True)
class BucketContents:
    """Sizes in bytes of the objects of each checkpoint, by its name; `begun`: attempts that have their object."""

    checkpoints: Mapping[str, Mapping[str, int]]
    unfinished: Mapping[str, Mapping[str, int]]
    begun: frozenset[int]
    was_whole: bool = False  # every rank once had all its part of a checkpoint there

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> BucketContents:
        """Objects that are none of these are somebody else's, and left alone."""
        found: dict[str, dict[str, int]] = {}
        begun = set[int]()
        for path, size in sizes.items():
            directory, _, name = path.partition("/")
            if (match := _ATTEMPT.fullmatch(path)) is not None:
                begun.add(int(match[1]))
            elif "/" not in name and name and parse_directory_name(directory) is not None:
                found.setdefault(directory, {})[name] = size
        whole = {name: files for name, files in found.items() if MANIFEST in files}
        unfinished = {name: found[name] for name in found.keys() - whole.keys()}
        return cls(whole, unfinished, frozenset(begun), WHOLE in sizes)

    @property
    def newest_first(self) -> list[str]:
        """Names of checkpoints."""
        return sorted(self.checkpoints, key=serial_of, reverse=True)

    @property
    def attempt(self) -> int:
        """The last one that was begun; 0 before the first."""
        names = (*self.checkpoints, *self.unfinished)
        return max((*self.begun, *(serial_of(name) // UPLOADS for name in names)), default=0)

    def is_kept(self, name: str) -> bool:
        """Whether it was marked as retained for good, after it was written."""
        return KEPT in self.checkpoints[name]


def by_rank(sizes: Mapping[str, int]) -> dict[tuple[int, int], BucketContents]:
    """(rank, size) -> what lies below its name; of one process it is what lies below none."""
    found: dict[tuple[int, int], dict[str, int]] = {(0, 1): {}}
    for path, size in sizes.items():
        directory, _, name = path.partition("/")
        rank = parse_directory(directory)
        if rank is None:
            found[0, 1][path] = size
        else:
            found.setdefault(rank, {})[name] = size
    return {rank: BucketContents.of(files) for rank, files in found.items()}


def has_ranks(sizes: Mapping[str, int]) -> bool:
    """Whether several processes have uploaded to it."""
    return len(by_rank(sizes)) > 1


def serial_of(name: str) -> int:
    """Of a checkpoint's name."""
    parsed = parse_directory_name(name)
    assert parsed is not None
    return parsed.serial


def iteration_of(name: str) -> int:
    """Of a checkpoint's name."""
    parsed = parse_directory_name(name)
    assert parsed is not None
    return parsed.iteration


def attempt_object(attempt: int) -> str:
    """3 -> "00000003.attempt"."""
    return f"{attempt:08d}.attempt"


def uploaded_as(manifest: Manifest, attempt: int, number: int) -> tuple[str, Manifest]:
    """The name and the manifest of an attempt's upload of this number, from 1 on."""
    serial = attempt * UPLOADS + number
    return directory_name(serial, manifest.iteration), manifest.model_copy(update={"serial": serial})


def content_of(manifest: Manifest) -> str:
    """The same on disk and in the bucket, where a checkpoint has other serials."""
    return digest_of(manifest.model_copy(update={"serial": 0}).model_dump(mode="json"))


def age(manifest: Manifest) -> tuple[str, int]:
    """When it was written, by the clock of the machine that wrote it: in UTC to the second, so text compares."""
    return manifest.created, manifest.iteration


def read_manifest(objects: Objects, name: str, sizes: Mapping[str, int]) -> Manifest:
    """Of a checkpoint whose objects have these sizes, each of which it lists. Raises CorruptStoreError, BucketError."""
    size = sizes[MANIFEST]
    if size > max_manifest_bytes(sum(sizes.values()) - size, len(sizes)):
        raise CorruptStoreError(f"{MANIFEST}: its {size} bytes are more than its files can need")
    try:
        manifest = parse_manifest(objects.read(f"{name}/{MANIFEST}"))
    except BucketError as error:
        if error.is_missing:
            raise CorruptStoreError(f"{MANIFEST}: is missing") from None
        raise
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{MANIFEST}: {error}") from None
    if directory_name(manifest.serial, manifest.iteration) != name:
        raise CorruptStoreError(f"{MANIFEST}: belongs to {directory_name(manifest.serial, manifest.iteration)}")
    for entry in manifest.files:
        if sizes.get(entry.name) != entry.size_bytes:
            has = f"has {sizes[entry.name]} bytes, not {entry.size_bytes}" if entry.name in sizes else "is missing"
            raise CorruptStoreError(f"{entry.name}: {has}")
    return manifest
