"""What the saver has to know, kept in the shared memory so that a saver that is started anew finds it there.

And what the process has to know that uploads to a bucket, which is told so at its start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from checkflow.errors import StoreError
from checkflow.store.both.retry import RETRY_S
from checkflow.store.format.layout import FileSpec
from checkflow.store.format.retention import Retention

C = TypeVar("C")
_StorePath = Annotated[  # its bytes in hexadecimal digits: a path need not be UTF-8
    Path,
    PlainSerializer(lambda path: os.fsencode(path).hex()),
    PlainValidator(lambda text: Path(os.fsdecode(bytes.fromhex(text)))),
]


@dataclass(frozen=True, slots=True)
class SaverConfig:
    """The store, what to write to it, how long to retain it, and the versions to name in manifests."""

    store: _StorePath  # when it was attached, for messages: the saver works in the directory itself
    lanes: tuple[tuple[FileSpec, ...], ...]  # the files in the slots of each lane
    retention: Retention
    versions: dict[str, str]
    newest_wins: bool = False  # what is due gives way to what is newer
    retry_s: float = RETRY_S  # how long what cannot be written is tried again
    grouped: bool = False  # other ranks have the other parts, and say what may be pruned
    replica: bool = False  # slots of the first kind alone are written: another process makes them of the second

    def dump(self) -> bytes:
        return _CONFIG.dump_json(self, warnings="error")  # what its reader would refuse

    @classmethod
    def parse(cls, data: bytes) -> SaverConfig:
        return _parsed(_CONFIG, data)


_CONFIG = TypeAdapter(SaverConfig)


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """Which store is uploaded where, and how long it is retained there."""

    store: _StorePath  # when it was attached, for messages
    url: str
    retention: Retention
    retry_s: float = RETRY_S  # how long what cannot be uploaded is tried again once nobody trains
    before: int = 0  # serial of the newest that was on disk when it was attached
    in_doubt: int = 0  # of several ranks: how many of the newest on disk may not be on the others' when they end
    whole_url: str | None = None  # of several ranks: where the parts of all lie

    @property
    def grouped(self) -> bool:
        """Other ranks upload the other parts: the trainer says which is next, and what all have there."""
        return self.in_doubt > 0

    def dump(self) -> bytes:
        return _BUCKET_CONFIG.dump_json(self, warnings="error")

    @classmethod
    def parse(cls, data: bytes) -> BucketConfig:
        return _parsed(_BUCKET_CONFIG, data)


_BUCKET_CONFIG = TypeAdapter(BucketConfig)


def _parsed(adapter: TypeAdapter[C], data: bytes) -> C:
    """Raises StoreError, in the one line that its trainer tells of how a process ended."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f" {part}" for part in first["loc"])
        raise StoreError(f"its configuration{where} cannot be read: {first['msg']}") from None
