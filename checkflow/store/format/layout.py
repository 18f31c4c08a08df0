"""Which files a checkpoint has and where each tensor's bytes lie, in a slot and in its file.

A slot's bytes are already the files' bytes: each file begins at a multiple of 4096 with its safetensors header, padded
with spaces so that the tensors begin at one too, and the tensors follow without a hole.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from checkflow.dtypes import ITEM_BYTES
from checkflow.errors import InputError
from checkflow.safetensorsfile import MAX_HEADER_BYTES, header_of

ALIGN_BYTES = 4096  # O_DIRECT's alignment on every file system that has it, and the page size
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"  # no separator, no leading dot: it cannot leave its directory


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file. `order`: its dimensions as they lie in memory, outermost first; None where logical."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A safetensors file. `aliases`: pairs of another name and the name of the tensor it is tied to."""

    name: str
    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and its bytes' place, counted from the slot's first byte."""

    spec: TensorSpec
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.spec.size_bytes


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """A file and its place in the slot; `tensors` in the order of their bytes, `header` with its length in front."""

    name: str
    offset_bytes: int
    size_bytes: int
    header: bytes
    tensors: tuple[PlacedTensor, ...]

    @property
    def padded_bytes(self) -> int:
        return padded(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Layout:
    """Every file's place in a slot of `size_bytes`, a multiple of 4096."""

    specs: tuple[FileSpec, ...]
    files: tuple[PlacedFile, ...]
    size_bytes: int
    _places: dict[tuple[str, str], PlacedTensor] = field(repr=False, compare=False)

    @classmethod
    def of(cls, specs: tuple[FileSpec, ...]) -> Layout:
        """The layout of these files, in their order. Raises InputError that names what no file could hold."""
        files: list[PlacedFile] = []
        offset = 0
        for spec in specs:
            if any(spec.name.casefold() == other.name.casefold() for other in files):
                raise InputError(f"layout: file {spec.name!r} is given twice; give each file its own name")
            files.append(_place(spec, offset))
            offset += files[-1].padded_bytes
        places = {(file.name, tensor.spec.name): tensor for file in files for tensor in file.tensors}
        return cls(specs, tuple(files), offset, places)

    def find(self, file: str, tensor: str) -> PlacedTensor:
        """Where a tensor lies. Raises KeyError for a name that no file has."""
        return self._places[file, tensor]


def padded(size_bytes: int) -> int:
    """The size rounded up to a multiple of 4096."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _place(spec: FileSpec, offset_bytes: int) -> PlacedFile:
    _check(spec)
    # safetensors' own order: wide elements first, so that every tensor is aligned to its element
    ordered = sorted(spec.tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header = header_of(((each.name, each.dtype, each.shape) for each in ordered), spec.aliases, ALIGN_BYTES)
    if len(header) - 8 > MAX_HEADER_BYTES:
        raise InputError(f"layout: {spec.name}: {len(ordered)} tensors need too long a header; use several files")
    placed: list[PlacedTensor] = []
    position = len(header)
    for tensor in ordered:
        placed.append(PlacedTensor(tensor, offset_bytes + position))
        position += tensor.size_bytes
    return PlacedFile(spec.name, offset_bytes, position, header, tuple(placed))


def _check(spec: FileSpec) -> None:
    if not re.match(FILE_NAME, spec.name) or not spec.name.endswith(".safetensors"):
        raise InputError(f"layout: file name {spec.name!r}: use letters, digits, '.', '_', '-' and end in .safetensors")
    names = [tensor.name for tensor in spec.tensors] + [alias for alias, _ in spec.aliases]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"layout: {spec.name}: tensor {twice!r} is given twice; rename one")
    if "__metadata__" in names or "format" in (alias for alias, _ in spec.aliases):
        raise InputError(f"layout: {spec.name}: safetensors reserves '__metadata__' and 'format'; rename the tensor")
    stored = {tensor.name for tensor in spec.tensors}
    for alias, target in spec.aliases:
        if target not in stored:
            raise InputError(f"layout: {spec.name}: alias {alias!r} is tied to {target!r}, which the file lacks")
    for tensor in spec.tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise InputError(f"layout: {spec.name}: {tensor.name}: safetensors has no dtype {tensor.dtype!r}")
        if any(extent < 0 for extent in tensor.shape):
            raise InputError(f"layout: {spec.name}: {tensor.name}: shape {tensor.shape} has a negative extent")
        if tensor.order is not None and sorted(tensor.order) != list(range(len(tensor.shape))):
            raise InputError(f"layout: {spec.name}: {tensor.name}: order {tensor.order} is no order of its dimensions")
