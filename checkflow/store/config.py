"""What the saver has to know, kept in the shared memory so that a saver that is started anew finds it there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from checkflow.store.layout import FileSpec
from checkflow.store.retention import Retention


@dataclass(frozen=True, slots=True)
class SaverConfig:
    """The store, what to write to it, how long to retain it, and the versions to name in manifests."""

    store: Path
    files: tuple[FileSpec, ...]
    retention: Retention
    versions: dict[str, str]

    def dump(self) -> bytes:
        return _CONFIG.dump_json(self)

    @classmethod
    def parse(cls, data: bytes) -> SaverConfig:
        return _CONFIG.validate_json(data)


_CONFIG = TypeAdapter(SaverConfig)
