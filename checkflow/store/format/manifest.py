"""A checkpoint's manifest: every file's size and hashes, strict and versioned.

It may come from anybody: everything is bounded by the size of the files it describes before it is believed.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from checkflow import strictjson
from checkflow.errors import CorruptStoreError
from checkflow.jsonfile import digest_of, render
from checkflow.store.format.layout import FILE_NAME

FORMAT: Final = "checkflow-checkpoint"
VERSION: Final = 1
MANIFEST, RECORD = "manifest.json", "commit.json"
KEPT = "kept"  # an empty file beside them: retained for good, which was said after it was written
BLOCK_BYTES: Final = 4194304
HASH_HEX = 32  # xxh3-128
MAX_FILES = 4096
MAX_RECORD_BYTES = 2**32  # more than anybody keeps beside tensors; it is read into memory
MAX_FILE_BYTES = 2**53  # JSON's integers
MAX_SERIAL = 10**15  # more than anybody writes, and less than a manifest can hold
MAX_CREATED = datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC)  # later than anybody writes, and a second more is a time

_DIRECTORY = re.compile(r"(?P<serial>\d{8,})-iteration-(?P<iteration>\d+)")
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
_Count = Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]


class FileEntry(BaseModel):
    """A file, its size and the xxh3-128 of each 4 MiB of it, as hexadecimal digits one block after the other."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=FILE_NAME)]
    size_bytes: _Count
    blocks: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]

    @field_validator("name")
    @classmethod
    def _not_the_manifest(cls, name: str) -> str:
        if name.casefold() == MANIFEST:
            raise ValueError("the manifest cannot list itself")
        return name

    @property
    def block_count(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES)

    def block_hash(self, block: int) -> str:
        return self.blocks[block * HASH_HEX : (block + 1) * HASH_HEX]


class Manifest(BaseModel):
    """What a checkpoint consists of. `serial` counts a store's checkpoints; the newest has the highest."""

    model_config = _STRICT

    format: Literal["checkflow-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    serial: _Count
    iteration: _Count
    keep: bool
    created: str  # in UTC, to the second: texts are in the order of times
    versions: dict[str, str]
    block_bytes: Literal[4194304] = BLOCK_BYTES
    block_hash: Literal["xxh3_128"] = "xxh3_128"
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1, max_length=MAX_FILES)]

    @field_validator("created")
    @classmethod
    def _as_it_is_written(cls, created: str) -> str:
        with contextlib.suppress(ValueError):
            when = datetime.fromisoformat(created)
            if when.tzinfo == UTC and when <= MAX_CREATED and when.isoformat(timespec="seconds") == created:
                return created
        raise ValueError("it is no time as checkflow writes it, like 2026-01-31T12:00:00+00:00")

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def tensor_files(self) -> tuple[FileEntry, ...]:
        """All but the commit record."""
        return tuple(file for file in self.files if file.name != RECORD)

    def entry(self, name: str) -> FileEntry:
        """A file's entry. Raises CorruptStoreError if the checkpoint has no such file."""
        for file in self.files:
            if file.name == name:
                return file
        raise CorruptStoreError(
            f"{directory_name(self.serial, self.iteration)}: has no {name}; take another checkpoint"
        )

    def render(self) -> bytes:
        """The manifest's file: this document with its digest."""
        document = self.model_dump(mode="json")
        return render(document | {"digest": digest_of(document)}).encode()


_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True, slots=True)
class DirectoryName:
    """What a checkpoint's directory name says."""

    serial: int
    iteration: int


def directory_name(serial: int, iteration: int) -> str:
    """(12, 340) -> "00000012-iteration-340"."""
    return f"{serial:08d}-iteration-{iteration}"


def parse_directory_name(name: str) -> DirectoryName | None:
    """The inverse; None for what is no checkpoint's name."""
    match = _DIRECTORY.fullmatch(name, endpos=64) if name.isascii() and len(name) <= 64 else None
    if match is None:
        return None
    parsed = DirectoryName(int(match["serial"]), int(match["iteration"]))
    if parsed.serial > MAX_SERIAL or parsed.iteration > MAX_FILE_BYTES:
        return None
    return parsed if directory_name(parsed.serial, parsed.iteration) == name else None


def max_manifest_bytes(data_bytes: int, files: int) -> int:
    """The longest manifest that files of this many bytes can need."""
    return 2**16 + files * 512 + (data_bytes // BLOCK_BYTES + files) * (HASH_HEX + 8)


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in a file's bytes, its digest checked. Raises CorruptStoreError that says what is wrong."""
    try:
        document = strictjson.loads(data)
    except ValueError as error:
        raise CorruptStoreError(f"is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise CorruptStoreError("is no JSON object")
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise CorruptStoreError(f"is not of format {FORMAT}, version {VERSION}")
    claimed = document.pop("digest", None)
    try:
        if claimed != digest_of(document):
            raise CorruptStoreError("its own digest does not match")
        manifest = _MANIFEST.validate_json(json.dumps(document), strict=True)
    except RecursionError:
        raise CorruptStoreError("is nested too deeply") from None
    except ValidationError as error:
        first = error.errors()[0]
        why = first["msg"].removeprefix("Value error, ")
        raise CorruptStoreError(f"field {'.'.join(str(part) for part in first['loc'])}: {why}") from None
    names = [file.name.casefold() for file in manifest.files]
    if len(set(names)) != len(names):
        raise CorruptStoreError("a file is listed twice")
    if RECORD not in names:
        raise CorruptStoreError(f"lists no {RECORD}")
    for file in manifest.files:
        if len(file.blocks) != file.block_count * HASH_HEX:
            raise CorruptStoreError(f"{file.name}: {len(file.blocks)} hash digits for {file.block_count} blocks")
    if manifest.entry(RECORD).size_bytes > MAX_RECORD_BYTES:
        raise CorruptStoreError(f"{RECORD}: is longer than any that checkflow writes")
    if manifest.render() != data:
        raise CorruptStoreError("its bytes are not as they were written")
    return manifest
