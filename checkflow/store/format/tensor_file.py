"""The tensors of a verified safetensors file. A matching hash makes no header sane: everything is checked here too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from checkflow import safetensorsfile
from checkflow.errors import CorruptStoreError


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


def contents_of(name: str, file: memoryview) -> Contents:
    """The tensors in a file's bytes; `name` is for messages. Raises CorruptStoreError that says what is wrong."""
    with _named(name):
        header, body = safetensorsfile.parse(file)
    tensors = {
        key: StoredTensor(key, entry.dtype, entry.shape, body[slice(*entry.data_offsets)])
        for key, entry in header.entries.items()
    }
    metadata = header.metadata.items()
    return Contents(tensors, {alias: tied for alias, tied in metadata if tied in tensors and alias not in tensors})


def header_bytes(name: str, first: bytes, size_bytes: int) -> int:
    """How long the header is, by the first 8 bytes of a file of this size. Raises CorruptStoreError."""
    with _named(name):
        return safetensorsfile.header_bytes(first, size_bytes)


def check_header(name: str, header: bytes, body_bytes: int) -> None:
    """As `contents_of`, where the header is all that was read."""
    with _named(name):
        safetensorsfile.parse_header(header, body_bytes)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except safetensorsfile.MalformedError as error:
        raise CorruptStoreError(f"{name}: {error}") from None
