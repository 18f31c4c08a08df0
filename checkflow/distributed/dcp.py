"""torch.distributed.checkpoint reads a store: whatever layout a state_dict has now, by its own planner.

state = {"model": model.state_dict()}
dcp.load(state, storage_reader=checkflow.StoreReader("checkpoints"))
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkflow.distributed.partitions import with_whole_optimizers
from checkflow.distributed.parts import Complete, all_in
from checkflow.distributed.reading import files_of, whole_file
from checkflow.distributed.resharding import owners_of
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.state.names import StateName, holder_of
from checkflow.state.restore.files import TensorFile

__all__ = ["StoreReader"]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A rank's part of a tensor."""

    rank: int
    file: str
    tensor: str


class StoreReader(StorageReader):
    """A StorageReader over a store, of any number of ranks; each file is verified before any of its bytes are used.

    Args:
        store: the directory that was given to attach.
        iteration: which checkpoint; the newest of which every part is there, unless given.

    The keys are those of `checkflow export --to dcp`, flattened: "model.features.0.weight",
    "optimizer.features.0.weight.exp_avg". Raises StoreError where there is none, CorruptStoreError where a part does
    not verify.
    """

    def __init__(self, store: str | os.PathLike[str], iteration: int | None = None) -> None:
        super().__init__()
        self._store = Path(store)
        self._iteration = iteration
        self._parts: Complete | None = None
        self._read: dict[tuple[int, str], TensorFile] = {}
        self._stored: dict[MetadataIndex, _Stored] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another store."""
        if checkpoint_id is not None:
            self._store = Path(checkpoint_id)
        self._parts = None
        self._read.clear()

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """What there is, by key."""
        parts = self._found()
        tensors: dict[str, TensorStorageMetadata] = {}
        stored: dict[MetadataIndex, _Stored] = {}
        for file_name in files_of(parts.ranks[0]):
            file = self._file(0, file_name)
            for name in (*file.tensors, *file.aliases):
                state = StateName.of(holder_of(file_name), name)
                held = file.tensors[file.aliases.get(name, name)]
                shard = parts.ranks[0].record.shards.get(state)
                shape = torch.Size(held.shape if shard is None else shard.shape)
                chunks: list[ChunkStorageMetadata] = []
                for place, rank in owners_of(parts, 0, state, tuple(shape)).items():
                    chunks.append(ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes)))
                    stored[MetadataIndex(_key(state), place.offsets)] = _Stored(rank, file_name, name)
                tensors[_key(state)] = TensorStorageMetadata(TensorProperties(dtype=held.dtype), shape, chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=stored)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, *_args: object, **_kwargs: object) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self._stored[item.storage_index]
            file = self._file(place.rank, place.file)
            source = file.tensors[file.aliases.get(place.tensor, place.tensor)].view()
            for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        self._read.clear()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _found(self) -> Complete:
        if self._parts is None:
            found = [parts for parts in all_in(self._store) if self._iteration in (None, parts.mark.iteration)]
            if not found:
                raise StoreError(f"{self._store}: has no such checkpoint that every rank has; see checkflow list")
            if found[0].ranks[0].record.replay is not None or found[0].ranks[0].record.lanes:
                raise InputError(f"{self._store}: was saved in parts; checkflow export --to dcp brings them together")
            self._parts = with_whole_optimizers(found[0], 0)
        return self._parts

    def _file(self, rank: int, name: str) -> TensorFile:
        if (rank, name) not in self._read:
            ranks = self._found().ranks
            try:
                self._read[rank, name] = whole_file(ranks[rank], name, dict(enumerate(ranks)))
            except CorruptStoreError as error:
                raise CorruptStoreError(f"{ranks[rank].checkpoint.path}: {error}") from None
        return self._read[rank, name]


def _key(name: StateName) -> str:
    """As torch.distributed.checkpoint flattens {holder: {path: tensor}}."""
    return f"{name.holder}.{name.path}"
