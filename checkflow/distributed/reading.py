"""A rank's files, verified: its own, and in their place what other ranks saved of what all had alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from checkflow.distributed.parts import RankPart
from checkflow.errors import CorruptStoreError
from checkflow.state.host.record import PartRecord, Record, ReplayRecord, UpdateRecord
from checkflow.state.names import StateName, file_of, holder_of, owner, stems
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.match import file_in
from checkflow.state.restore.rebuild import is_in_parts, is_of_gradients


def file_names(part: RankPart) -> list[str]:
    """The files that have tensors of it, whoever saved them, as if it had left in one."""
    return list(
        dict.fromkeys([*_own_files(part), *(file_of(StateName(name).holder) for name in part.record.elsewhere)])
    )


def as_saved(part: RankPart, ranks: Mapping[int, RankPart]) -> tuple[dict[str, TensorFile], Record]:
    """All of a rank's files, for its training to restore, and the record that goes with them: of what left in parts the
    training makes the updates again, other ranks' among it. `ranks` and what is raised as of `whole_file`."""
    record = part.record
    if not any(is_in_parts(each.record) for each in (part, *ranks.values())):
        return {name: whole_file(part, name, ranks) for name in file_names(part)}, record
    savers = sorted(set(record.elsewhere.values()))
    saved = {None: part.gathered()} | {rank: _seen(part, ranks, rank).gathered() for rank in savers}
    saver = _saver_in(record)
    found: dict[str, TensorFile] = {}
    for rank, files in saved.items():
        for name, file in files.items():
            into = found.setdefault(name, TensorFile({}, {}))
            into.tensors.update({path: tensor for path, tensor in file.tensors.items() if saver(name, path) == rank})
            into.aliases.update({path: to for path, to in file.aliases.items() if saver(name, path) == rank})
    for state, rank in record.elsewhere.items():
        name, path = file_of(StateName(state).holder), StateName(state).path
        if name not in found or not {path} & (found[name].tensors.keys() | found[name].aliases.keys()):
            raise _lacks(ranks[rank].checkpoint.path / name, path)
    return found, record.model_copy(update={"replay": _replay(part, ranks), "lanes": ()})


def _saver_in(record: Record) -> Callable[[str, str], int | None]:
    """Of a file's tensor: the rank that tells of its parameter, and so of all that is kept of that, its gradients too;
    None for this rank. What updates begin with is of one rank and one iteration: all of it is its saver's."""
    by_stem: dict[StateName, StateName] = {}
    for optimizer in record.optimizers:
        names = (StateName(name) for group in optimizer.groups for name in group.parameters)
        by_stem |= {stem: name for name, stem in stems(optimizer.name, names).items()}

    def saver(file: str, path: str) -> int | None:
        if is_of_gradients(file):
            return record.elsewhere.get(path)
        name = StateName.of(holder_of(file), path)
        return record.elsewhere.get(owner(name, by_stem) or name)

    return saver


def _replay(part: RankPart, ranks: Mapping[int, RankPart]) -> ReplayRecord | None:
    """The updates of what this rank saved, and of what others did in its place: each rank tells of its own share."""
    elsewhere = part.record.elsewhere
    parts: list[PartRecord] = []
    updates: list[UpdateRecord] = []
    for rank, each in ((None, part), *sorted(ranks.items())):
        if (replay := each.record.replay) is None:
            continue
        for its in replay.parts:
            names = tuple(name for name in its.parameters if elsewhere.get(name) == rank)
            parts += [its.model_copy(update={"parameters": names})] if names else []
        for update in replay.updates:
            names = tuple(name for name in update.gradients if elsewhere.get(name) == rank)
            rows = {name: count for name, count in update.factor_rows.items() if name in names}
            updates += [update.model_copy(update={"gradients": names, "factor_rows": rows})] if names else []
    in_order = tuple(sorted(updates, key=lambda update: -update.back))
    return ReplayRecord(parts=tuple(parts), updates=in_order) if parts else None


def _own_files(part: RankPart) -> list[str]:
    if is_in_parts(part.record):
        return list(part.brought_together)
    return [entry.name for entry in part.checkpoint.manifest.tensor_files]


def whole_file(part: RankPart, name: str, ranks: Mapping[int, RankPart]) -> TensorFile:
    """One of them; `ranks`: the parts that can be seen, by rank.

    Raises CorruptStoreError, also where one cannot be seen that is needed; StoreError where something is scarce.
    """
    own = tensors_of(part, name) if name in _own_files(part) else TensorFile({}, {})
    found = TensorFile(dict(own.tensors), dict(own.aliases))
    by_rank: dict[int, list[str]] = {}
    for state, rank in part.record.elsewhere.items():
        if file_of(StateName(state).holder) == name:
            by_rank.setdefault(rank, []).append(StateName(state).path)
    for rank, paths in by_rank.items():
        seen = _seen(part, ranks, rank)
        other = tensors_of(seen, name)
        for path in paths:
            _take(path, other, found, seen.checkpoint.path / name)
    return found


def _seen(part: RankPart, ranks: Mapping[int, RankPart], rank: int) -> RankPart:
    if rank not in ranks:
        raise CorruptStoreError(
            f"{part.checkpoint.path}: rank {rank} has a share of it, which cannot be seen here; bring the "
            "directories of all ranks to one place that every rank sees"
        )
    return ranks[rank]


def _take(path: str, other: TensorFile, found: TensorFile, where: Path) -> None:
    """A tensor of another rank's file."""
    if path in other.aliases:
        found.aliases[path] = other.aliases[path]
    elif path in other.tensors:
        found.tensors[path] = other.tensors[path]
    else:
        raise _lacks(where, path)


def _lacks(where: Path, path: str) -> CorruptStoreError:
    return CorruptStoreError(f"{where}: lacks {path}, which no other has")


def tensors_of(part: RankPart, name: str) -> TensorFile:
    """A file of a rank's part, verified. Raises as `RankPart.brought_together` does."""
    if is_in_parts(part.record):
        return part.brought_together[name]
    return file_in(part.record, name, part.read(name))
