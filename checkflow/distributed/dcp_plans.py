"""What a rank writes of a state_dict: tensors in one file, all else in its record, of which nothing is a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from checkflow import strictjson
from checkflow.distributed.state_dicts import FILE
from checkflow.dtypes import CODES, name_of
from checkflow.errors import FormatError, InputError, StoreError
from checkflow.state.host.capture import versions
from checkflow.state.host.encode import encode
from checkflow.state.host.json_values import Json, dump
from checkflow.state.host.record import (
    FORMAT,
    VERSION,
    ChunkRecord,
    IndexRecord,
    MemberRecord,
    TensorRecord,
    parse_record,
)
from checkflow.state.host.rng import RngReader
from checkflow.state.memory import as_bytes
from checkflow.state.names import StateName
from checkflow.state.refused import check_dtype, check_stored
from checkflow.store.format.begun import NewFile
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.pieces import packed
from checkflow.torch_ranks import plans_kept

_STALE = (
    "planner: leaves out plans that have not changed, and another planner of this process has such, too; use "
    "enable_plan_caching=False"
)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A rank's share: its file, unless it has no tensor, its values by key, and where each item of the plan will be."""

    files: tuple[NewFile, ...]
    values: Mapping[str, Json]
    results: list[WriteResult]


def rank_plan(items: Sequence[WriteItem], planner: SavePlanner, rank: int) -> RankPlan:
    """Tensors are asked for only as their file is written. Raises InputError that names what cannot be saved."""
    tensors: dict[str, WriteItem] = {}
    values: dict[str, Json] = {}
    results: list[WriteResult] = []
    for item in items:
        key = _checked(item.index.fqn)
        if item.type == WriteItemType.BYTE_IO:
            values[key] = encode(_value(planner, item), key)
            results.append(WriteResult(item.index, len(dump(values[key])), rank))
            continue
        spec = _spec(_unused(key, tensors), item)
        tensors[spec.name] = item
        assert item.tensor_data is not None
        chunk = ChunkRecord(
            rank=rank, tensor=spec.name, offsets=tuple(item.tensor_data.chunk.offsets), sizes=spec.shape
        )
        results.append(WriteResult(item.index, spec.size_bytes, chunk))
    return RankPlan(_files(tensors, planner), values, results)


def restored(plans: Sequence[SavePlan], kind: str | None) -> list[SavePlan | None]:
    """By rank, what a planner that caches leaves out since it is as before, as planners keep it in this process, the
    coordinator's. `kind`: of the planner that was there before. Raises InputError where it is not known which it is."""
    if all(plan.usable for plan in plans):
        return [None] * len(plans)
    sent = {rank: plan for rank, plan in enumerate(plans) if plan.usable}
    fitting = {
        each: kept
        for each, kept in plans_kept().items()
        if len(kept) == len(plans) and all(kept[rank].items is plan.items for rank, plan in sent.items())
    }
    if len(fitting) != 1 and kind not in fitting:
        raise InputError(_STALE)
    found = fitting[kind] if kind in fitting else next(iter(fitting.values()))
    return [None if plan.usable else kept for plan, kept in zip(plans, found, strict=True)]


def check_restored(plans: Sequence[SavePlan | None], planner: SavePlanner) -> None:
    """By the coordinator. Raises InputError where its planner's are others."""
    planned = getattr(planner, "global_plan", ())
    if any(plan and (rank >= len(planned) or plan.items is not planned[rank].items) for rank, plan in enumerate(plans)):
        raise InputError(_STALE)


def index_of_all(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> IndexRecord:
    """Where everything is, once all ranks have said it. Raises StoreError where nobody wrote a part."""
    said = [result for of_rank in results for result in of_rank]
    chunks = {
        (each.index.fqn, each.storage_data.offsets): each.storage_data
        for each in said
        if isinstance(each.storage_data, ChunkRecord)
    }
    ranks = {each.index.fqn: each.storage_data for each in said if isinstance(each.storage_data, int)}
    tensors: dict[str, TensorRecord] = {}
    values: dict[str, int] = {}
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            parts = [chunks.get((key, tuple(chunk.offsets))) for chunk in described.chunks]
            found = tuple(part for part in parts if part is not None)
            if len(found) == len(parts):
                dtype, shape = name_of(described.properties.dtype), tuple(described.size)
                tensors[key] = TensorRecord(dtype=dtype, shape=shape, chunks=found)
        elif key in ranks:
            values[key] = ranks[key]
        if key not in tensors and key not in values:
            raise StoreError(f"{key}: no rank wrote all of it, so there is no checkpoint; plan all of it anew")
    return IndexRecord(tensors=tensors, values=values, planner=encode(metadata.planner_data, "planner_data"))


def record_of(
    iteration: int, member: MemberRecord | None, values: Mapping[str, Json], index: IndexRecord | None = None
) -> bytes:
    """A rank's record. Raises InputError for text that no JSON reader takes."""
    document: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "fingerprints": {},
        "versions": versions(),
        "models": [],
        "optimizers": [],
        "objects": [],
        "rng": strictjson.loads(RngReader().read({})),
        "metadata": {},
        "state_dict": {"values": values, "index": None if index is None else index.model_dump(mode="json")},
    }
    if member is not None:
        document["member"] = member.model_dump(mode="json")
    found = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    try:
        parse_record(found, "state_dict")  # what cannot be read is not written
    except FormatError as error:
        raise InputError(str(error).replace("take another checkpoint", "correct it")) from None
    return found


def _checked(key: object) -> str:
    try:
        if isinstance(key, str):
            key.encode()
            return key
    except UnicodeEncodeError:
        pass
    raise InputError(f"state_dict: the key {key!r:.80} is no text that a file can hold; rename it")


def _unused(key: str, names: Mapping[str, object]) -> str:
    """The key itself, but for the second part that a rank has of one tensor, and what safetensors reserves."""
    name, number = key, 0
    while name in names or name == "__metadata__":
        number += 1
        name = f"{key}#{number}"
    return name


def _value(planner: SavePlanner, item: WriteItem) -> object:
    """The object itself: what resolve_data gives is pickled."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise InputError(
            f"{item.index.fqn}: {type(planner).__name__} gives it only as bytes, which nothing here unpickles; use a "
            "planner with lookup_object(), as DefaultSavePlanner has"
        )
    return lookup(item.index)


def _spec(name: str, item: WriteItem) -> TensorSpec:
    assert item.tensor_data is not None
    dtype = name_of(item.tensor_data.properties.dtype)
    check_dtype(StateName(item.index.fqn), dtype)
    return TensorSpec(name, CODES[dtype], tuple(item.tensor_data.chunk.sizes))


def _files(tensors: Mapping[str, WriteItem], planner: SavePlanner) -> tuple[NewFile, ...]:
    if not tensors:
        return ()
    specs = tuple(_spec(name, item) for name, item in tensors.items())
    (file,) = Layout.of((FileSpec(FILE, specs),)).files

    def sources() -> Iterator[memoryview]:
        yield memoryview(file.header)
        for placed in file.tensors:
            yield _bytes(planner, tensors[placed.spec.name], placed.spec)

    return (NewFile(FILE, file.size_bytes, packed(sources(), file.size_bytes)),)


def _bytes(planner: SavePlanner, item: WriteItem, spec: TensorSpec) -> memoryview:
    name, tensor = StateName(item.index.fqn), planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name}: {type(planner).__name__} gives a {type(tensor).__name__} for a tensor; correct it")
    check_stored(name, tensor)
    if tuple(tensor.shape) != spec.shape or CODES.get(name_of(tensor.dtype)) != spec.dtype:
        raise InputError(f"{name}: is {tensor.dtype} {tuple(tensor.shape)}, which its plan does not say; plan it anew")
    flat = as_bytes(tensor.detach().resolve_conj().resolve_neg().cpu())
    return memoryview(flat.numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
