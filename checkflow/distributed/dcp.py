"""torch.distributed.checkpoint reads a store: whatever layout a state_dict has now, by its own planner.

state = {"model": model.state_dict()}
dcp.load(state, storage_reader=checkflow.StoreReader("checkpoints"))
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkflow.distributed.joining import files_of_all, has_more
from checkflow.distributed.marks import Mark, check_iteration
from checkflow.distributed.partitions import with_whole_optimizers
from checkflow.distributed.parts import Complete, all_in, unread_in
from checkflow.distributed.reading import file_names, whole_file
from checkflow.distributed.resharding import owners_of
from checkflow.distributed.sharing import require_copies_alike
from checkflow.distributed.state_dicts import FILE, chunk_of, index_of, rank_with_index, value_of
from checkflow.dtypes import name_of
from checkflow.errors import CheckflowError, CorruptStoreError, StoreError
from checkflow.state.host.decode import decode
from checkflow.state.host.json_values import TENSOR_DTYPES
from checkflow.state.host.record import ChunkRecord, TensorRecord
from checkflow.state.names import StateName, holder_of
from checkflow.state.restore.files import TensorFile
from checkflow.store.format.manifest import RECORD
from checkflow.workdir import absolute_path

__all__ = ["StoreReader"]


@dataclass(frozen=True, slots=True)
class _StoredChunk:
    """A part of a tensor, in a file of its rank."""

    file: str
    dtype: str
    chunk: ChunkRecord

    @property
    def place(self) -> tuple[int, str]:
        return self.chunk.rank, self.file


@dataclass(frozen=True, slots=True)
class _StoredValue:
    """What is no tensor, in a rank's record."""

    rank: int
    key: str

    @property
    def place(self) -> tuple[int, str]:
        return self.rank, RECORD


@dataclass(frozen=True, slots=True)
class _Which:
    """A checkpoint, among all of a store. `serial`: where one process saved it, which may save an iteration twice."""

    mark: Mark
    serial: int

    @classmethod
    def of(cls, parts: Complete) -> _Which:
        return cls(parts.mark, 0 if parts.mark.attempt else parts.ranks[0].checkpoint.serial)


class _Unread(Metadata):
    """Of which each field raises why there is none."""

    def __init__(self, error: CheckflowError) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> object:
        if name in Metadata.__dataclass_fields__:
            raise self._error
        return super().__getattribute__(name)


class StoreReader(StorageReader):
    """A StorageReader over a store, of any number of ranks; each file is verified before any of its bytes are used.

    Args:
        store: the directory that was given to attach, or to a StoreWriter.
        iteration: which checkpoint; the newest of which every part is there, unless given. Ranks that load together
            load the one that their coordinator sees.

    The keys of what StoreWriter saved are those that it was given. Of what `attach` saved they are those of
    `checkflow export --to dcp`, flattened: "model.features.0.weight", "optimizer.features.0.weight.exp_avg". Raises
    StoreError where there is none, or where a rank does not see the coordinator's; CorruptStoreError where a part does
    not verify; torch hands them on in a CheckpointException.
    """

    def __init__(self, store: str | os.PathLike[str], iteration: int | None = None) -> None:
        super().__init__()
        check_iteration(iteration)
        self._store = absolute_path("store", store, "a directory")
        self._iteration = iteration
        self.load_id = str(uuid.uuid4())  # for logs
        self._parts: Complete | None = None
        self._stored: Mapping[MetadataIndex, _StoredChunk | _StoredValue] = {}

    @property
    def checkpoint_id(self) -> Path:
        """The store."""
        return self._store

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another store."""
        if checkpoint_id is not None:
            self._store = absolute_path("checkpoint_id", checkpoint_id, "a directory")
        self._parts = None

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """What there is now, by key. Where that cannot be had, the error is raised to who asks the metadata for any of
        it, as `load` does: what is raised here torch takes for a checkpoint of another form."""
        try:
            self._parts = _newest(self._store, self._iteration)
            found = _metadata_of(self._parts)
        except CheckflowError as error:
            return _Unread(error)
        saved = self._parts.ranks[_rank_that_names(self._parts)].checkpoint.path.name
        found.storage_meta = StorageMeta(checkpoint_id=self._store, save_id=saved, load_id=self.load_id)
        return found

    def set_up_storage_reader(self, metadata: Metadata, *_args: object, **_kwargs: object) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=_Which.of(self._looked()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """By the coordinator: all ranks read the checkpoint that it sees, whatever was saved since another looked."""
        return [replace(plan, storage_data=_Which.of(self._looked())) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts = self._agreed(plan)

        def place(item: ReadItem) -> tuple[int, str]:
            return self._stored[item.storage_index].place

        for (rank, name), items in groupby(sorted(plan.items, key=place), key=place):  # a file is held at a time
            file = None if name == RECORD else _file(parts, rank, name)
            for item in items:
                stored = self._stored[item.storage_index]
                if isinstance(stored, _StoredValue):
                    planner.load_bytes(item, _as_torch_saves(parts, stored))
                    continue
                assert file is not None
                source = chunk_of(file, stored.dtype, stored.chunk, str(parts.ranks[rank].checkpoint.path))
                for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, offset, size)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _looked(self) -> Complete:
        if self._parts is None:  # the metadata are another reader's
            self._parts = _newest(self._store, self._iteration)
        return self._parts

    def _agreed(self, plan: LoadPlan) -> Complete:
        """What the coordinator sees. Raises StoreError where that is not here, or is not as this rank has planned."""
        here, which = self._looked(), plan.storage_data
        if not isinstance(which, _Which) or which == _Which.of(here):
            return here
        self._parts = _seen(self._store, which)
        planned, found = _metadata_of(here), _metadata_of(self._parts)
        for key in {item.storage_index.fqn for item in plan.items}:
            if planned.state_dict_metadata.get(key) != found.state_dict_metadata.get(key):
                raise StoreError(
                    f"{self._store}: was saved to while ranks looked, {key!r:.200} in another shape or division; load "
                    "again"
                )
        self._stored = found.storage_data
        return self._parts

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _newest(store: Path, iteration: int | None) -> Complete:
    """Of that iteration, if given. Raises StoreError where every rank has none, CorruptStoreError where a newer one's
    manifest or record is not what was written."""
    found = [parts for parts in all_in(store) if iteration in (None, parts.mark.iteration)]
    if not found:
        raise StoreError(f"{store}: has no such checkpoint that every rank has; see checkflow list")
    for part in found[0].ranks if iteration is None else ():
        for newer in unread_in(part.checkpoint.path.parent, part.checkpoint.serial):
            raise CorruptStoreError(f"{newer.path}: {newer.reason}; give StoreReader the iteration of an older one")
    return with_whole_optimizers(found[0], 0)


def _seen(store: Path, which: _Which) -> Complete:
    """Raises StoreError where it is not there."""
    for parts in all_in(store):
        if _Which.of(parts) == which:
            return with_whole_optimizers(parts, 0)
    raise StoreError(
        f"{store}: the coordinator loads iteration {which.mark.iteration}, of which not every part is seen here; load "
        "again, or give every rank the same store"
    )


def _is_of_dict(parts: Complete) -> bool:
    return parts.ranks[0].record.state_dict is not None


def _rank_that_names(parts: Complete) -> int:
    """The one whose directory has the checkpoint's save_id."""
    return rank_with_index(parts) if _is_of_dict(parts) else 0


def _metadata_of(parts: Complete) -> Metadata:
    return _metadata_of_dict(parts) if _is_of_dict(parts) else _metadata_of_training(parts)


def _metadata_of_training(parts: Complete) -> Metadata:
    tensors: dict[str, STORAGE_TYPES] = {}
    stored: dict[MetadataIndex, _StoredChunk | _StoredValue] = {}
    paths: dict[str, tuple[str, str]] = {}
    known: set[StateName] = set()
    for rank, part in enumerate(parts.ranks):
        if rank and not has_more(part.record, known):
            continue
        names = file_names(part)
        require_copies_alike(parts, rank)
        for file_name in names if not rank else sorted(files_of_all(part.record).intersection(names)):
            file = _file(parts, rank, file_name)
            for name in (*file.tensors, *file.aliases):
                state = StateName.of(holder_of(file_name), name)
                if state in known:
                    continue
                known.add(state)
                held = file.tensors[file.aliases.get(name, name)]
                shard = part.record.shards.get(state)
                shape = held.shape if shard is None else shard.shape
                chunks = tuple(
                    ChunkRecord(rank=owner, tensor=name, offsets=place.offsets, sizes=place.sizes)
                    for place, owner in owners_of(parts, rank, state, shape).items()
                )
                record = TensorRecord(dtype=name_of(held.dtype), shape=shape, chunks=chunks)
                key = f"{state.holder}.{state.path}"  # as dcp flattens {holder: {path: tensor}}
                paths[key] = state.holder, state.path
                tensors[key] = _described(record)
                stored |= _places(key, record, file_name)
    return Metadata(state_dict_metadata=tensors, planner_data=paths, storage_data=stored)


def _metadata_of_dict(parts: Complete) -> Metadata:
    index = index_of(parts)
    described: dict[str, STORAGE_TYPES] = {}
    stored: dict[MetadataIndex, _StoredChunk | _StoredValue] = {}
    for key, record in index.tensors.items():
        described[key] = _described(record)
        stored |= _places(key, record, FILE)
    for key, rank in index.values.items():
        described[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = _StoredValue(rank, key)
    planner = decode(index.planner, f"{parts.ranks[0].checkpoint.path}: planner")
    return Metadata(state_dict_metadata=described, planner_data=planner, storage_data=stored)


def _described(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in record.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=TENSOR_DTYPES[record.dtype]), torch.Size(record.shape), chunks)


def _places(key: str, record: TensorRecord, file: str) -> dict[MetadataIndex, _StoredChunk]:
    return {MetadataIndex(key, chunk.offsets): _StoredChunk(file, record.dtype, chunk) for chunk in record.chunks}


def _as_torch_saves(parts: Complete, stored: _StoredValue) -> io.BytesIO:
    """A value as planners want it: pickled here, of what JSON says, so that nothing from the disk is unpickled."""
    value = decode(
        value_of(parts, stored.key, stored.rank), f"{parts.ranks[stored.rank].checkpoint.path}: {stored.key}"
    )
    found = io.BytesIO()
    torch.save(value, found)
    found.seek(0)
    return found


def _file(parts: Complete, rank: int, name: str) -> TensorFile:
    """A rank's file, verified, with what other ranks saved in its place. Raises CorruptStoreError that names it."""
    try:
        return whole_file(parts.ranks[rank], name, dict(enumerate(parts.ranks)))
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{parts.ranks[rank].checkpoint.path}: {error}") from None
