"""The tensors in a safetensors file's bytes. Sizes and places are checked against the bytes before they are used.

safetensors' own reader copies each tensor; these bytes may be most of the host's memory, so tensors are views of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from checkflow.errors import FormatError
from checkflow.hoststate.decode import load
from checkflow.hoststate.forms import dump
from checkflow.store.layout import CODES, ITEM_BYTES, MAX_HEADER_BYTES, FileSpec

_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in CODES.items()}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_METADATA: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file: its elements in logical order. `order`: how its dimensions lay in memory, if not as usual."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview
    order: tuple[int, ...] | None = None

    def view(self) -> torch.Tensor:
        """The tensor on the CPU, a view of the file's bytes (a copy if they are read-only)."""
        if not len(self.data):
            return torch.empty(self.shape, dtype=self.dtype)
        data = bytearray(self.data) if self.data.readonly else self.data
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Tied:
    """A tensor that is live already: a parameter that optimizer state is tied to."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file's tensors by name, and its aliases: other name -> the name it is tied to; `live`: to what is live."""

    tensors: dict[str, FileTensor]
    aliases: dict[str, str]
    live: dict[str, Tied] = field(default_factory=dict)


def parse_file(name: str, data: memoryview) -> TensorFile:
    """Raises FormatError that names the file and what is wrong with it."""
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise _wrong(name, "has no safetensors header")
    header = load(bytes(data[8 : 8 + size]), name)
    if not isinstance(header, dict):
        raise _wrong(name, "its header is no object")
    try:
        metadata = _METADATA.validate_python(header.pop("__metadata__", {}), strict=True)
        entries = {key: _Entry.model_validate_json(dump(entry), strict=True) for key, entry in header.items()}
    except ValidationError as error:
        raise _wrong(name, f"its header is malformed ({error.errors()[0]['msg']})") from None
    aliases = {alias: target for alias, target in metadata.items() if alias != "format"}
    for alias, target in aliases.items():
        if target not in entries or alias in entries:
            raise _wrong(name, f"{alias!r:.80} is tied to what the file lacks")
    return TensorFile(_placed(name, entries, data[8 + size :]), aliases)


def file_of_spec(spec: FileSpec) -> TensorFile:
    """A file as it will be written, without bytes."""
    tensors = {tensor.name: FileTensor(_DTYPES[tensor.dtype], tensor.shape, memoryview(b"")) for tensor in spec.tensors}
    return TensorFile(tensors, dict(spec.aliases))


def _placed(name: str, entries: dict[str, _Entry], data: memoryview) -> dict[str, FileTensor]:
    end = 0
    found: dict[str, FileTensor] = {}
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        low, high = entry.data_offsets
        if entry.dtype not in _DTYPES or any(extent < 0 for extent in entry.shape):
            raise _wrong(name, f"{key!r:.80} has dtype {entry.dtype!r:.20} and shape {entry.shape!s:.80}")
        if low != end or high - low != math.prod(entry.shape) * ITEM_BYTES[entry.dtype] or high > len(data):
            raise _wrong(name, f"{key!r:.80} does not lie where its header says")
        found[key] = FileTensor(_DTYPES[entry.dtype], entry.shape, data[low:high])
        end = high
    if end != len(data):
        raise _wrong(name, "bytes follow its last tensor")
    return {key: found[key] for key in entries}


def _wrong(name: str, reason: str) -> FormatError:
    return FormatError(f"{name}: {reason}; take another checkpoint")
