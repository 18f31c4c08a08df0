"""A state_dict that torch.distributed.checkpoint saved: what a checkpoint's records and files have of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkflow.distributed.parts import Complete, RankPart
from checkflow.distributed.reading import tensors_of
from checkflow.dtypes import CODES, name_of
from checkflow.errors import CorruptStoreError
from checkflow.state.host.json_values import Json
from checkflow.state.host.record import ChunkRecord, IndexRecord, StateDictRecord, TensorRecord
from checkflow.state.restore.files import FileTensor, TensorFile
from checkflow.state.shards import Place, fill

FILE = "state.safetensors"


def index_of(parts: Complete) -> IndexRecord:
    """Where everything is: each part of a tensor within it, of a rank that there is. Raises CorruptStoreError."""
    index = state_dict_of(parts.ranks[rank_with_index(parts)]).index
    assert index is not None
    for key, tensor in index.tensors.items():
        if tensor.dtype not in CODES:
            raise CorruptStoreError(f"{_name(parts)}: its index gives {key!r:.200} the dtype {tensor.dtype!r:.20}")
        if not all(_is_within(chunk, tensor.shape) and chunk.rank < parts.size for chunk in tensor.chunks):
            raise CorruptStoreError(f"{_name(parts)}: its index has a part of {key!r:.200} outside of it")
    if any(rank >= parts.size for rank in index.values.values()):
        raise CorruptStoreError(f"{_name(parts)}: its index names a rank that it does not have")
    return index


def rank_with_index(parts: Complete) -> int:
    """The one that was the coordinator. Raises CorruptStoreError where there is none, or more."""
    found = [rank for rank, part in enumerate(map(state_dict_of, parts.ranks)) if part.index is not None]
    if len(found) != 1:
        raise CorruptStoreError(f"{_name(parts)}: {len(found)} of its records say what is where, not one")
    return found[0]


def _is_within(chunk: ChunkRecord, shape: tuple[int, ...]) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        offset + size <= extent for offset, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def state_dict_of(part: RankPart) -> StateDictRecord:
    """What a rank's record has of it. Raises CorruptStoreError where that is of a training."""
    if part.record.state_dict is None:
        raise CorruptStoreError(f"{part.checkpoint.path}: is of a training, other ranks' parts of a state_dict")
    return part.record.state_dict


def values_of(parts: Complete) -> dict[str, Json]:
    """What is no tensor, encoded, by key. Raises CorruptStoreError for one that its rank does not have."""
    return {key: value_of(parts, key, rank) for key, rank in index_of(parts).values.items()}


def value_of(parts: Complete, key: str, rank: int) -> Json:
    """One of these. Raises CorruptStoreError where the rank does not have it."""
    held = state_dict_of(parts.ranks[rank]).values
    if key not in held:
        raise CorruptStoreError(f"{parts.ranks[rank].checkpoint.path}: lacks the value {key!r:.200}")
    return held[key]


def chunk_of(file: TensorFile, dtype: str, chunk: ChunkRecord, where: str) -> torch.Tensor:
    """A part of a tensor, in its rank's verified file. Raises CorruptStoreError where that has another one there."""
    held = file.tensors.get(file.aliases.get(chunk.tensor, chunk.tensor))
    if held is None or held.shape != chunk.sizes or name_of(held.dtype) != dtype:
        raise CorruptStoreError(f"{where}: {chunk.tensor!r:.200} is not in its files as its record says")
    return held.view()


def assembled(parts: Complete) -> TensorFile:
    """All tensors, whole. Raises CorruptStoreError where a part does not verify, or they do not fill one."""
    index = index_of(parts)
    used = {chunk.rank for tensor in index.tensors.values() for chunk in tensor.chunks}
    files = {rank: tensors_of(parts.ranks[rank], FILE) for rank in sorted(used)}
    return TensorFile({key: _whole(parts, files, key, record) for key, record in index.tensors.items()}, {})


def _whole(parts: Complete, files: Mapping[int, TensorFile], key: str, record: TensorRecord) -> FileTensor:
    places = [Place(record.shape, chunk.offsets, chunk.sizes) for chunk in record.chunks]
    if not places or not fill(record.shape, places):
        raise CorruptStoreError(f"{_name(parts)}: its ranks' parts do not fill {key!r:.200}")
    made: torch.Tensor | None = None
    for chunk in record.chunks:
        where = str(parts.ranks[chunk.rank].checkpoint.path)
        source = chunk_of(files[chunk.rank], record.dtype, chunk, where)
        made = torch.empty(record.shape, dtype=source.dtype) if made is None else made
        target = made
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(source)
    assert made is not None
    flat = made.reshape(-1).view(torch.uint8)
    return FileTensor(made.dtype, tuple(made.shape), memoryview(flat.numpy()) if len(flat) else memoryview(b""))  # type: ignore[arg-type]


def _name(parts: Complete) -> str:
    return str(parts.ranks[0].checkpoint.path)
