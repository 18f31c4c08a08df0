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
    if len(file) < 8:
        raise CorruptStoreError(f"{name}: {len(file)} bytes hold no safetensors header")
    length = int.from_bytes(file[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(file) - 8):
        raise CorruptStoreError(f"{name}: its header of {length} bytes is longer than it may be")
    metadata, entries = _parse(name, bytes(file[8 : 8 + length]))
    body = file[8 + length :]
    end = 0
    tensors: dict[str, StoredTensor] = {}
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        low, high = entry.data_offsets
        if entry.dtype not in ITEM_BYTES:
            raise CorruptStoreError(f"{name}: tensor {key!r}: unknown dtype {entry.dtype!r}")
        if low != end or high - low != math.prod(entry.shape) * ITEM_BYTES[entry.dtype] or high > len(body):
            raise CorruptStoreError(f"{name}: tensor {key!r}: bytes {low} to {high} are not its place")
        tensors[key] = StoredTensor(key, entry.dtype, entry.shape, body[low:high])
        end = high
    if end != len(body):
        raise CorruptStoreError(f"{name}: {len(body) - end} bytes belong to no tensor")
    aliases = {alias: target for alias, target in metadata.items() if target in tensors and alias not in tensors}
    return Contents(tensors, aliases)


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
        raise CorruptStoreError(f"{name}: header field {where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{name}: its header is no JSON ({str(error)[:80]})") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
