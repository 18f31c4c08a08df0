"""The tensors of a verified safetensors file. A matching hash makes no header sane: everything is checked here too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from checkflow.errors import CorruptStoreError
from checkflow.store.layout import ITEM_BYTES, MAX_HEADER_BYTES

MAX_DIMENSIONS = 64
_Count = Annotated[int, Field(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in logical order: safetensors' dtype code, shape, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Contents:
    """A file's tensors by name, and the other names of tied ones."""

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dtype: str
    shape: Annotated[tuple[_Count, ...], Field(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


_ENTRIES = TypeAdapter(dict[str, _Entry])
_METADATA = TypeAdapter(dict[str, str])


def contents_of(name: str, file: memoryview) -> Contents:
    """The tensors in a file's bytes; `name` is for messages. Raises CorruptStoreError that says what is wrong."""
    length = header_bytes(name, bytes(file[:8]), len(file))
    metadata, entries = _checked(name, bytes(file[8 : 8 + length]), len(file) - 8 - length)
    body = file[8 + length :]
    tensors = {
        key: StoredTensor(key, entry.dtype, entry.shape, body[entry.data_offsets[0] : entry.data_offsets[1]])
        for key, entry in entries
    }
    aliases = {alias: target for alias, target in metadata.items() if target in tensors and alias not in tensors}
    return Contents(tensors, aliases)


def header_bytes(name: str, first: bytes, size_bytes: int) -> int:
    """How long the header is, by the first 8 bytes of a file of this size. Raises CorruptStoreError."""
    if len(first) < 8:
        raise CorruptStoreError(f"{name}: {len(first)} bytes hold no safetensors header")
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CorruptStoreError(f"{name}: its header of {length} bytes is longer than it may be")
    return length


def check_header(name: str, header: bytes, body_bytes: int) -> None:
    """As `contents_of`, where the header is all that was read."""
    _checked(name, header, body_bytes)


def _checked(name: str, header: bytes, body_bytes: int) -> tuple[dict[str, str], list[tuple[str, _Entry]]]:
    """Metadata, and entries in the order of their bytes, which they fill without a hole."""
    metadata, entries = _parse(name, header)
    ordered = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    end = 0
    for key, entry in ordered:
        low, high = entry.data_offsets
        if entry.dtype not in ITEM_BYTES:
            raise CorruptStoreError(f"{name}: tensor {key!r:.200}: unknown dtype {entry.dtype!r:.20}")
        if low != end or high - low != math.prod(entry.shape) * ITEM_BYTES[entry.dtype] or high > body_bytes:
            raise CorruptStoreError(f"{name}: tensor {key!r:.200}: bytes {low} to {high} are not its place")
        end = high
    if end != body_bytes:
        raise CorruptStoreError(f"{name}: {body_bytes - end} bytes belong to no tensor")
    return metadata, ordered


def _parse(name: str, header: bytes) -> tuple[dict[str, str], dict[str, _Entry]]:
    try:
        document = json.loads(header, object_pairs_hook=_unique)
        if not isinstance(document, dict):
            raise ValueError("no object")
        metadata = _METADATA.validate_python(document.pop("__metadata__", {}), strict=True)
        return metadata, _ENTRIES.validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptStoreError(f"{name}: header field {where:.200}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{name}: its header is no JSON ({str(error)[:80]})") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
