"""A rank's files, verified: its own, and in their place what other ranks saved of what all had alike."""

from __future__ import annotations

from collections.abc import Mapping

from checkflow.distributed.parts import RankPart
from checkflow.errors import CorruptStoreError
from checkflow.state.names import StateName, file_of
from checkflow.state.restore.files import TensorFile, parse_file
from checkflow.store.format.reader import nothing_is_scarce, read_file


def files_of(part: RankPart) -> list[str]:
    """The files that have tensors of it, whoever saved them."""
    own = (entry.name for entry in part.checkpoint.manifest.tensor_files)
    return list(dict.fromkeys([*own, *(file_of(StateName(name).holder) for name in part.record.elsewhere)]))


def whole_file(part: RankPart, name: str, ranks: Mapping[int, RankPart]) -> TensorFile:
    """One of them; `ranks`: the parts that can be seen, by rank.

    Raises CorruptStoreError, also where one cannot be seen that is needed; StoreError where something is scarce.
    """
    has_own = any(entry.name == name for entry in part.checkpoint.manifest.tensor_files)
    found = tensors_of(part, name) if has_own else TensorFile({}, {})
    by_rank: dict[int, list[str]] = {}
    for state, rank in part.record.elsewhere.items():
        if file_of(StateName(state).holder) == name:
            by_rank.setdefault(rank, []).append(StateName(state).path)
    for rank, paths in by_rank.items():
        if rank not in ranks:
            raise CorruptStoreError(f"{part.checkpoint.path}: rank {rank} has a share of it, which cannot be seen here")
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
    """A file of a rank's part, verified. Raises CorruptStoreError, StoreError where something is scarce."""
    return parse_file(name, bytes_of(part, name))


def bytes_of(part: RankPart, name: str) -> memoryview:
    """The same, whatever it has."""
    try:
        with nothing_is_scarce(part.checkpoint.path):
            return read_file(part.checkpoint, name)
    except CorruptStoreError as error:
        whose = f"{part.checkpoint.path.parent.name}/" if part.record.member is not None else ""
        raise CorruptStoreError(f"{whose}{error}") from None
