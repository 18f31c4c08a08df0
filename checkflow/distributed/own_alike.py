"""What optimizers keep under a text, by rank: each saves its own, so that as many ranks have theirs again.

Of another number of ranks none has it by itself; where all had the same, there is no question whose it is.
"""

from __future__ import annotations

from checkflow.distributed.parts import Complete
from checkflow.distributed.reading import tensors_of
from checkflow.errors import InputError
from checkflow.state.host.record import OptimizerRecord
from checkflow.state.restore.files import FileTensor
from checkflow.state.restore.own import own_stored_in


def require_own_alike(parts: Complete) -> None:
    """Raises InputError where ranks of a training kept something else under a text."""
    first: dict[str, tuple[int, OptimizerRecord]] = {}
    for rank, part in enumerate(parts.ranks):
        for theirs in part.record.optimizers:
            lowest, held = first.setdefault(theirs.name, (rank, theirs))
            if rank != lowest and (held.own != theirs.own or not _files_alike(parts, lowest, rank, held)):
                keys = ", ".join(sorted({*_keys(held), *_keys(theirs)}))
                raise InputError(
                    f"{held.name}.state of {held.type}: ranks {lowest} and {rank} do not have alike what it keeps "
                    f"under a text ({keys:.200}), and nothing says whose it is now; resume with {parts.size} ranks, "
                    "divided as they were"
                )


def _keys(optimizer: OptimizerRecord) -> list[str]:
    return [] if optimizer.own is None else list(optimizer.own.values)


def _files_alike(parts: Complete, lowest: int, rank: int, optimizer: OptimizerRecord) -> bool:
    paths = own_stored_in(optimizer)
    if not paths:
        return True
    one, other = (tensors_of(parts.ranks[number], optimizer.file) for number in (lowest, rank))
    return all(_alike(one.tensors.get(path), other.tensors.get(path)) for path in paths)


def _alike(one: FileTensor | None, other: FileTensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.dtype, one.shape, bytes(one.data)) == (other.dtype, other.shape, bytes(other.data))
