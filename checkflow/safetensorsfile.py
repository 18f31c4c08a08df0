"""The header of a safetensors file, written and read. What is read is believed as far as the file's size bears it out.

A file is 8 bytes with the header's length, the header, and the tensors' bytes without a hole. Nothing imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from checkflow import strictjson
from checkflow.dtypes import ITEM_BYTES

MAX_HEADER_BYTES = 100_000_000  # safetensors refuses longer ones
MAX_DIMENSIONS = 64
_Count = Annotated[int, Field(ge=0, le=2**53)]


class MalformedError(ValueError):
    """What is wrong with a file, in one line that does not name it."""


class Entry(BaseModel):
    """A tensor: safetensors' dtype code, shape, and its bytes' place behind the header."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dtype: str
    shape: Annotated[tuple[_Count, ...], Field(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class Header:
    """Entries in the header's order, and the metadata, which holds other names of tied tensors."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


_ENTRIES = TypeAdapter(dict[str, Entry])
_METADATA = TypeAdapter(dict[str, str])


def header_of(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], aliases: Iterable[tuple[str, str]], align_bytes: int
) -> bytes:
    """The beginning of a file of (name, dtype code, shape), one behind the other, its length a multiple of the given.

    `aliases`: pairs of another name and the name of the tensor it is tied to.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(aliases)}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align_bytes)
    return len(text).to_bytes(8, "little") + text


def header_bytes(first: bytes, size_bytes: int) -> int:
    """How long the header is, by the first 8 bytes of a file of this size. Raises MalformedError."""
    if len(first) < 8:
        raise MalformedError(f"{len(first)} bytes hold no safetensors header")
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise MalformedError(f"its header of {length} bytes is longer than it may be")
    return length


def parse(file: memoryview) -> tuple[Header, memoryview]:
    """A file's header, and the bytes behind it. Raises MalformedError."""
    length = header_bytes(bytes(file[:8]), len(file))
    return parse_header(bytes(file[8 : 8 + length]), len(file) - 8 - length), file[8 + length :]


def parse_header(text: bytes, body_bytes: int) -> Header:
    """The header in these bytes, whose tensors fill the bytes behind it without a hole. Raises MalformedError."""
    header = _parsed(text)
    end = 0
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].data_offsets):
        low, high = entry.data_offsets
        if entry.dtype not in ITEM_BYTES:
            raise MalformedError(f"tensor {name!r:.200}: unknown dtype {entry.dtype!r:.20}")
        if low != end or high - low != math.prod(entry.shape) * ITEM_BYTES[entry.dtype] or high > body_bytes:
            raise MalformedError(f"tensor {name!r:.200}: bytes {low} to {high} are not its place")
        end = high
    if end != body_bytes:
        raise MalformedError(f"{body_bytes - end} bytes belong to no tensor")
    return header


def _parsed(text: bytes) -> Header:
    try:
        document = strictjson.loads(text)
    except ValueError as error:
        raise MalformedError(f"its header is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise MalformedError("its header is no object")
    try:
        metadata = _METADATA.validate_python(document.pop("__metadata__", {}), strict=True)
        return Header(_ENTRIES.validate_json(json.dumps(document), strict=True), metadata)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedError(f"header field {where:.200}: {first['msg']}") from None
    except RecursionError:
        raise MalformedError("its header is nested too deeply") from None
