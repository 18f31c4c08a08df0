"""The tensors in a safetensors file's bytes, once its header was checked against them.

safetensors' own reader copies each tensor; these bytes may be most of the host's memory, so tensors are views of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from checkflow import safetensorsfile
from checkflow.dtypes import CODES
from checkflow.errors import FormatError
from checkflow.state.names import in_state_dict

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in CODES.items()}


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
    try:
        header, body = safetensorsfile.parse(data)
    except safetensorsfile.MalformedError as error:
        raise _wrong(name, str(error)) from None
    aliases = {alias: target for alias, target in header.metadata.items() if alias != "format"}
    for alias, target in aliases.items():
        if target not in header.entries or alias in header.entries:
            raise _wrong(name, f"{alias!r:.80} is tied to what the file lacks")
    tensors = {
        key: FileTensor(DTYPES[entry.dtype], entry.shape, body[slice(*entry.data_offsets)])
        for key, entry in header.entries.items()
    }
    return TensorFile(tensors, aliases)


def file_of_state(name: str, data: memoryview) -> TensorFile:
    """Of models or optimizers, under the names of now. Raises FormatError as `parse_file` does."""
    found = parse_file(name, data)
    tensors = {in_state_dict(key): tensor for key, tensor in found.tensors.items()}
    aliases = {in_state_dict(alias): in_state_dict(target) for alias, target in found.aliases.items()}
    if len(tensors) + len(aliases) < len(found.tensors) + len(found.aliases) or not tensors.keys().isdisjoint(aliases):
        raise _wrong(name, "two tensors have the same name in state_dict")
    return TensorFile(tensors, aliases)


def _wrong(name: str, reason: str) -> FormatError:
    return FormatError(f"{name}: {reason}; take another checkpoint")
