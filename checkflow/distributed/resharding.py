"""A checkpoint of any number of ranks as one rank of another training has it.

Each tensor that this rank needs a part of is put together from the parts of those who shared it. Which overlap is what
torch.distributed.checkpoint's planner says. All else (what every rank had whole, the host's state) is that of one of
the earlier ranks: of the same number, modulo how many there were. What ranks have in common now they take of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkflow import strictjson
from checkflow.distributed.joining import files_of_all, has_more, joined_files, joined_record, names_in
from checkflow.distributed.own_alike import require_own_alike
from checkflow.distributed.partitions import with_whole_optimizers
from checkflow.distributed.parts import Complete, all_in, lost_in, unread_in
from checkflow.distributed.reading import file_names, tensors_of, whole_file
from checkflow.distributed.sharing import (
    Wanted,
    Where,
    is_whole,
    place_in,
    require_copies_alike,
    savers_of,
    taken_from,
)
from checkflow.distributed.state_dicts import FILE, assembled, values_of
from checkflow.errors import CorruptStoreError, FormatError, StoreError
from checkflow.state.divided import alike_in
from checkflow.state.host.record import Record, ShardRecord
from checkflow.state.live import entry_stems, live_state
from checkflow.state.names import StateName, file_of, holder_of, owner
from checkflow.state.restore.files import FileTensor, TensorFile
from checkflow.state.restore.match import check_is_of_training
from checkflow.state.restore.rebuild import record_of_whole, what_was_made, written
from checkflow.state.shards import Place, fill, is_shared, lowest_of, place_of
from checkflow.store.format.manifest import RECORD
from checkflow.store.format.reader import Loaded, SkippedCheckpoint
from checkflow.training import Training


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A rank's files, and the record that goes with them."""

    files: Mapping[str, TensorFile]
    record: Record


def reshaped(parts: Complete, rank: int, where: Where) -> Reshaped:
    """What a rank of another training restores.

    Updates that are to be made again are made on the host. Raises CorruptStoreError where a part does not verify,
    FormatError where parts do not fill the whole, InputError where only the training that saved it can make them, or
    where nothing says whose an optimizer's own state is, or which parts belong together.
    """
    number = taken_from(parts, rank, where)
    parts = with_whole_optimizers(parts, number)
    first = parts.ranks[number]
    record = first.record
    check_is_of_training(record)
    require_own_alike(parts)
    require_copies_alike(parts, number)
    by_file: dict[str, dict[StateName, ShardRecord]] = {}
    for name, shard in record.shards.items():
        by_file.setdefault(file_of(StateName(name).holder), {})[StateName(name)] = shard
    files = {name: _file(parts, number, name, by_file.get(name, {}), where) for name in file_names(first)}
    own = parts.ranks[rank % parts.size]
    if own is not parts.ranks[number]:
        files |= {each.file: tensors_of(own, each.file) for each in own.record.objects if each.file}
    its_own = {field: getattr(own.record, field) for field in ("objects", "rng", "metadata", "losses")}
    return Reshaped(files, record.model_copy(update={**its_own, "replay": None, "lanes": ()}))


def of_all(parts: Complete) -> Reshaped:
    """All of it, whole: what the first rank has, and what others have under other names.

    Raises as `reshaped` does, and InputError that names what of another rank cannot be taken over.
    """
    made = reshaped(parts, 0, whole)
    for rank in range(1, parts.size):
        known = names_in(made.files)
        if has_more(parts.ranks[rank].record, known):
            theirs = reshaped(parts, rank, whole)
            record = joined_record(made.record, theirs.record, known, rank)
            made = Reshaped(joined_files(made.files, theirs.files, files_of_all(theirs.record)), record)
    return made


@dataclass(frozen=True, slots=True)
class Consolidated:
    """A checkpoint as if one rank had had it, and why newer ones were skipped.

    `updates`: how many were made again for it; `differs`: why its bits may not be the training's.
    """

    loaded: Loaded
    skipped: tuple[SkippedCheckpoint, ...]
    updates: int
    differs: str


def consolidated(store: Path, iteration: int | None = None) -> Consolidated:
    """The newest checkpoint (of that iteration, if given) of which every rank's part verifies. What each rank had by
    itself is the first one's; of names that differ by rank, as in the stages of a pipeline, each is there.

    Raises CorruptStoreError where none verifies, StoreError where there is none, InputError where only its training can
    make its updates again.
    """
    skipped: list[SkippedCheckpoint] = []
    found = all_in(store)
    for parts in found:
        if iteration is not None and parts.mark.iteration != iteration:
            continue
        checkpoint = parts.ranks[0].checkpoint
        try:
            made = of_all(parts) if parts.ranks[0].record.state_dict is None else None
            files = {FILE: assembled(parts)} if made is None else made.files
            record = record_of_whole(bytes(parts.ranks[0].read(RECORD)))
        except CorruptStoreError as error:
            skipped.append(SkippedCheckpoint(checkpoint.path, checkpoint.serial, checkpoint.iteration, str(error)))
            continue
        document = strictjson.loads(record)
        assert isinstance(document, dict)
        fields = {key: value for key, value in document.items() if key not in ("member", "shards", "elsewhere")}
        if made is None:
            fields["state_dict"] = {"values": values_of(parts)}
        else:
            for field in ("models", "optimizers"):
                said = getattr(made.record, field)
                fields[field] = [each.model_dump(mode="json", exclude_defaults=True) for each in said]
            for field in ("frozen", "gradients"):
                if (names := getattr(made.record, field)) is not None:
                    fields[field] = list(names)
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        if iteration is None:
            skipped += [
                newer
                for part in parts.ranks
                for newer in unread_in(part.checkpoint.path.parent, part.checkpoint.serial)
            ]
            told = {each.iteration for each in skipped}
            skipped += [each for each in lost_in(store, parts.mark) if each.iteration not in told]
        loaded = Loaded(checkpoint, {name: written(file) for name, file in files.items()}, text)
        return Consolidated(loaded, tuple(skipped), *_made_in(parts))
    if skipped:
        raise CorruptStoreError(f"{store}: no checkpoint verifies on every rank ({skipped[0]}); restore it from a copy")
    has = ", ".join(str(each) for each in sorted({parts.mark.iteration for parts in found})) or "none"
    raise StoreError(f"{store}: has no checkpoint {_of(iteration)}that every rank has; it has {has}")


def _made_in(parts: Complete) -> tuple[int, str]:
    """Of all ranks' parts together; see `what_was_made`."""
    found = [what_was_made(part.record) for part in parts.ranks]
    return max(updates for updates, _ in found), next((differs for _, differs in found if differs), "")


def _of(iteration: int | None) -> str:
    return "" if iteration is None else f"of iteration {iteration} "


def whole(_name: StateName, shape: tuple[int, ...]) -> Wanted:
    """All of it."""
    return Wanted(Place(shape, (0,) * len(shape), shape))


def needed_by(training: Training) -> Where:
    """What a rank's training needs: its part of what ranks share now, all of the rest."""
    held = {live.name: live.held for live in live_state(training)}
    parameters = {stem: parameter for of_one in entry_stems(training) for stem, parameter in of_one.items()}
    replicas = {StateName(name): alike.ranks[0] for alike in alike_in(training) for name in alike.sizes_bytes}
    lowest = {id(held[name]): rank for name, rank in replicas.items()}  # of DistributedDataParallel's

    def where(name: StateName, shape: tuple[int, ...]) -> Wanted:
        parameter = owner(name, parameters)
        tensor = held.get(name)
        if tensor is None:  # an entry that the optimizer makes in its first update, as its parameter is
            tensor = parameter if parameter is not None and tuple(parameter.shape) == shape else None
        if tensor is not None and (place := place_of(tensor)) is not None:
            return Wanted(place, lowest_of(tensor))
        return replace(whole(name, shape), lowest=lowest.get(id(tensor if parameter is None else parameter)))

    return where


def is_shared_alike(record: Record, training: Training) -> bool:
    """Whether a rank's part has what this rank needs of what ranks share, and those share it who did."""
    where = needed_by(training)

    def is_alike(shard: ShardRecord, wanted: Wanted) -> bool:
        by_itself = is_whole(wanted.place) and wanted.lowest is None
        return place_in(shard) == wanted.place and (by_itself or shard.lowest in (None, wanted.lowest))

    alike = all(is_alike(shard, where(StateName(name), shard.shape)) for name, shard in record.shards.items())
    return alike and all(live.name in record.shards for live in live_state(training) if is_shared(live.held))


def _file(parts: Complete, first: int, name: str, shards: Mapping[StateName, ShardRecord], where: Where) -> TensorFile:
    base = whole_file(parts.ranks[first], name, dict(enumerate(parts.ranks)))
    tensors = dict(base.tensors)
    wanted: dict[StateName, Place] = {}
    savers: dict[StateName, int] = {}  # of those that ranks had whole
    for path, tensor in base.tensors.items():
        state = StateName.of(holder_of(name), path)
        shard = shards.get(state)
        found = where(state, tensor.shape if shard is None else shard.shape)
        if found.place != (whole(state, tensor.shape).place if shard is None else place_in(shard)):
            wanted[state] = found.place
        if shard is None and found.lowest is not None and (saver := _saver(parts, first, state, found.lowest)) != first:
            savers[state], wanted[state] = saver, found.place
    made = {state: torch.empty(place.sizes, dtype=tensors[state.path].dtype) for state, place in wanted.items()}
    for number, pieces in sorted(_pieces(parts, first, wanted, savers).items()):
        file = base if number == first else tensors_of(parts.ranks[number], name)
        for piece in pieces:
            path = file.aliases.get(piece.state.path, piece.state.path)
            if path not in file.tensors:
                raise CorruptStoreError(f"{parts.ranks[number].checkpoint.path / name}: lacks {piece.state.path}")
            source = _narrowed(file.tensors[path].view(), piece.source, piece.sizes)
            _narrowed(made[piece.state], piece.target, piece.sizes).copy_(source)
    for state, ours in made.items():
        flat = ours.reshape(-1).view(torch.uint8)
        data = memoryview(flat.numpy()) if ours.numel() else memoryview(b"")  # type: ignore[arg-type]
        tensors[state.path] = FileTensor(ours.dtype, tuple(ours.shape), data)
    return TensorFile(tensors, base.aliases)


def _saver(parts: Complete, first: int, state: StateName, lowest: int) -> int:
    """Whose file has what each rank had whole: all that have it in common now take it of one rank, which is `first`
    where that had the same, as where ranks divided an optimizer's state."""
    lead = lowest % parts.size
    optimizers = parts.ranks[lead].record.optimizers
    if any(each.name == state.holder and each.partition is not None for each in optimizers):
        return first
    whose = [parts.ranks[rank].record.elsewhere.get(state, rank) for rank in (lead, first)]
    return first if whose[0] == whose[1] else whose[0]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a tensor: where it lies in a rank's part, and where in ours."""

    state: StateName
    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]


def _pieces(
    parts: Complete, first: int, wanted: Mapping[StateName, Place], savers: Mapping[StateName, int]
) -> dict[int, list[_Piece]]:
    """By the rank that has them: see `owners_of`, of the set of `first`; of what is whole that is its saver."""
    found: dict[int, list[_Piece]] = {}
    for state, place in wanted.items():
        owners = owners_of(parts, savers.get(state, first), state, place.shape)
        chunks = list(owners)
        for index, source, target, sizes in _overlaps(chunks, place):
            found.setdefault(owners[chunks[index]], []).append(_Piece(state, source, target, sizes))
    return found


def owners_of(parts: Complete, first: int, state: StateName, shape: tuple[int, ...]) -> dict[Place, int]:
    """The parts of a tensor of this shape, each with the rank that has it: of the set that shares it with `first`.

    Of several that have the same part it is the lowest that saved it, and `first` of what is whole: others saved that
    in its place. Those without elements are left out, unless the whole has none. Raises FormatError where they do not
    have each element once.
    """
    if state not in parts.ranks[first].record.shards:
        return {whole(state, shape).place: first}
    owners = {place: savers[0] for place, savers in savers_of(parts, first, state).items()}
    if not fill(shape, owners):
        raise FormatError(
            f"{state:.200}: its ranks' parts do not fill it, each element once (as where a part is no block); take "
            "another checkpoint"
        )
    return owners


def _overlaps(
    chunks: Sequence[Place], wanted: Place
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(place: Place) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes))

    if 0 in wanted.sizes:
        return
    saved = TensorStorageMetadata(TensorProperties(), torch.Size(wanted.shape), [chunk(place) for place in chunks])
    for item in create_read_items_for_chunk_list("", saved, [chunk(wanted)]):
        index = item.storage_index.index
        assert index is not None
        yield index, tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)


def _narrowed(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
