"""A rank's files, verified: its own, and in their place what other ranks saved of what all had alike."""

from __future__ import annotations

from collections.abc import Mapping

from checkflow.distributed.parts import RankPart
from checkflow.errors import CorruptStoreError
from checkflow.state.names import StateName, file_of
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.match import file_in
from checkflow.state.restore.rebuild import is_in_parts


def file_names(part: RankPart) -> list[str]:
    """The files that have tensors of it, whoever saved them, as if it had left in one."""
    return list(
        dict.fromkeys([*_own_files(part), *(file_of(StateName(name).holder) for name in part.record.elsewhere)])
    )


def as_saved(part: RankPart, ranks: Mapping[int, RankPart]) -> dict[str, TensorFile]:
    """All of a rank's files, for its training to restore: of one in parts it makes the updates again. `ranks` and what
    is raised as of `whole_file`."""
    if is_in_parts(part.record):
        return part.gathered()
    return {name: whole_file(part, name, ranks) for name in file_names(part)}


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
        if rank not in ranks:
            raise CorruptStoreError(
                f"{part.checkpoint.path}: rank {rank} has a share of it, which cannot be seen here; bring the "
                "directories of all ranks to one place that every rank sees"
            )
        other = tensors_of(ranks[rank], name)
        for path in paths:
            if path in other.aliases:
                found.aliases[path] = other.aliases[path]
            elif path in other.tensors:
                found.tensors[path] = other.tensors[path]
            else:
                raise CorruptStoreError(f"{ranks[rank].checkpoint.path / name}: lacks {path}, which no other has")
    return found


def tensors_of(part: RankPart, name: str) -> TensorFile:
    """A file of a rank's part, verified. Raises as `RankPart.brought_together` does."""
    if is_in_parts(part.record):
        return part.brought_together[name]
    return file_in(part.record, name, part.read(name))
