"""Which of a checkpoint's ranks share a tensor: their parts fill one whole, and another set's parts another one.

Sets that train by themselves, as in local SGD over groups of FSDP2, have other bytes under the same names. Each shard's
record says the lowest rank of its set. Older records do not: there all ranks are one set. Within a set all that have
the same part have to have the same bytes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkflow.distributed.parts import Complete, RankPart
from checkflow.distributed.reading import tensors_of
from checkflow.errors import InputError
from checkflow.state.host.record import ShardRecord
from checkflow.state.names import StateName, file_of
from checkflow.state.restore.files import FileTensor, TensorFile
from checkflow.state.restore.rebuild import is_in_parts
from checkflow.state.shards import Place


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part that a rank wants of a tensor; `lowest`: of the ranks that share it now, or have it alike, None where
    this one has it by itself."""

    place: Place
    lowest: int | None = None


Where = Callable[[StateName, tuple[int, ...]], Wanted]
"""The part that is wanted of a tensor, by its name and the shape of the whole."""


def place_in(shard: ShardRecord) -> Place:
    """Where a rank's part lies."""
    return Place(shard.shape, shard.offsets, shard.sizes)


def is_whole(place: Place) -> bool:
    """Whether the part is all of it."""
    return place.sizes == place.shape


def set_of(parts: Complete, rank: int, state: StateName) -> dict[int, ShardRecord]:
    """The ranks that share a tensor with this one, each with its part; none has a part in another stage."""
    own = parts.ranks[rank].record.shards[state]
    found = {number: part.record.shards.get(state) for number, part in enumerate(parts.ranks)}
    return {number: shard for number, shard in found.items() if shard is not None and shard.lowest == own.lowest}


def savers_of(parts: Complete, rank: int, state: StateName) -> dict[Place, list[int]]:
    """Of the parts of its set those that have elements, or the one of a tensor that has none: who has saved each."""
    found: dict[Place, list[int]] = {}
    for number, shard in set_of(parts, rank, state).items():
        place = place_in(shard)
        if state not in parts.ranks[number].record.elsewhere and (0 not in place.sizes or 0 in place.shape):
            found.setdefault(place, []).append(number)
    return found


def taken_from(parts: Complete, rank: int, where: Where) -> int:
    """The earlier rank whose models and optimizers a rank takes over: of its own number, modulo how many there were,
    unless ranks that have a tensor in common now would take it of several sets.

    Raises InputError where no earlier rank was in the right set of each tensor.
    """
    own = rank % parts.size
    leads: dict[StateName, ShardRecord] = {}  # of the earlier rank that the set of now goes by
    for name, shard in parts.ranks[own].record.shards.items():
        lowest = where(StateName(name), shard.shape).lowest
        if (lead := parts.ranks[(rank if lowest is None else lowest) % parts.size].record.shards.get(name)) is not None:
            leads[StateName(name)] = lead
    fitting = [number for number, part in enumerate(parts.ranks) if _is_in_each_set(part, leads)]
    if fitting:
        return own if own in fitting else fitting[rank % len(fitting)]
    raise InputError(
        f"{next(iter(leads)):.200}: ranks shared it and others in sets that cross, and share them otherwise now; "
        f"resume with {parts.size} ranks, divided as they were"
    )


def _is_in_each_set(part: RankPart, leads: Mapping[StateName, ShardRecord]) -> bool:
    shards = part.record.shards
    return all(state in shards and shards[state].lowest == lead.lowest for state, lead in leads.items())


def require_copies_alike(parts: Complete, rank: int) -> None:
    """Raises InputError where two ranks of its set have saved other bytes of the same part, so that nothing says which
    parts belong together."""
    copies: dict[tuple[int, int], list[StateName]] = {}
    for name in parts.ranks[rank].record.shards:
        for place, savers in savers_of(parts, rank, StateName(name)).items():
            for other in savers[1:] if not is_whole(place) else ():
                copies.setdefault((savers[0], other), []).append(StateName(name))
    for (one, other), states in copies.items():
        if differs := _differs(parts.ranks[one], parts.ranks[other], states):
            raise InputError(
                f"{differs:.200}: ranks {one} and {other} have saved other bytes of the same part of it, and nothing "
                f"says which ranks' parts belong together; resume with {parts.size} ranks, divided as they were"
            )


def _differs(one: RankPart, other: RankPart, states: list[StateName]) -> StateName | None:
    """The first of these that two ranks do not have alike."""
    for file in dict.fromkeys(file_of(state.holder) for state in states):
        if _is_same_file(one, other, file):
            continue
        ours, theirs = tensors_of(one, file), tensors_of(other, file)
        for state in states:
            if file_of(state.holder) == file and _data(ours, state) != _data(theirs, state):
                return state
    return None


def _is_same_file(one: RankPart, other: RankPart, name: str) -> bool:
    if is_in_parts(one.record) or is_in_parts(other.record):
        return False
    blocks = [
        [each.blocks for each in part.checkpoint.manifest.tensor_files if each.name == name] for part in (one, other)
    ]
    return blocks[0] == blocks[1]


def _data(file: TensorFile, state: StateName) -> memoryview | None:
    found: Mapping[str, FileTensor] = file.tensors
    tensor = found.get(file.aliases.get(state.path, state.path))
    return None if tensor is None else tensor.data
