"""Of the state that several ranks have alike, what this rank saves, and what others do.

Alike are parameters that DistributedDataParallel has sent to all ranks and an optimizer updates, the same part of a
DTensor (replicas in HSDP have it), and what optimizers keep of both, where all of it begins with the same bytes. All
else is each rank's own: buffers, what was listed, random generators, what is on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
import xxhash
from torch.distributed import get_process_group_ranks
from torch.nn.parallel import DistributedDataParallel

from checkflow.division import Division
from checkflow.errors import InputError
from checkflow.state.live import Live, in_models, listed_state, live_state, parameter_names, parameters_of
from checkflow.state.memory import as_bytes
from checkflow.state.names import StateName
from checkflow.state.shards import is_shared, local, ranks_alike
from checkflow.torch_internals import storage_id
from checkflow.torch_ranks import may_differ, received_by, sums_gradients
from checkflow.training import Training
from checkflow.wrapped import is_zero

_STRETCH = 2**22  # elements that are brought to the host at once


@dataclass(frozen=True, slots=True)
class Alike:
    """Parameters that these ranks, ascending, have alike if they begin so: the bytes of this rank's part of each, by
    name. `shares_with`: of one that lies in the storage of an earlier one, which."""

    ranks: tuple[int, ...]
    sizes_bytes: Mapping[str, int]
    shares_with: Mapping[str, str] = field(default_factory=dict)


def modules_alike(training: Training) -> list[DistributedDataParallel]:
    """The modules that DistributedDataParallel wraps, as it has them, in order."""
    return [part for part in _modules(training) if isinstance(part, DistributedDataParallel)]


def alike_in(training: Training) -> list[Alike]:
    """What this rank has as others do, by who they are."""
    updated = {
        id(parameter)
        for optimizer in training.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    of_ddp = {
        id(parameter): tuple(get_process_group_ranks(ddp.process_group))
        for ddp in modules_alike(training)
        if not may_differ(ddp)
        for parameter in _kept_alike(ddp, updated)
    }
    replicas_differ = any(
        may_differ(part) for part in _modules(training) if not isinstance(part, DistributedDataParallel)
    )
    ranks_of = {
        id(parameter): (() if replicas_differ else ranks_alike(parameter))
        if is_shared(parameter)
        else of_ddp.get(id(parameter), ())
        for _, parameter in parameters_of(training)
    }
    besides = (live for live in chain(in_models(training), listed_state(training.listed)) if live.tensor.numel())
    own = {_storage_of(live.held) for live in besides if not ranks_of.get(id(live.held))}
    found: dict[tuple[int, ...], dict[str, int]] = {}
    firsts: dict[int, str] = {}
    shares_with: dict[str, str] = {}
    for name, parameter in parameters_of(training):
        part, ranks = local(parameter), ranks_of[id(parameter)]
        if ranks and part.numel() and (storage := _storage_of(parameter)) not in own:
            found.setdefault(ranks, {})[str(name)] = part.numel() * part.element_size()
            if (first := firsts.setdefault(storage, str(name))) != name:
                shares_with[str(name)] = first
    return [
        Alike(ranks, sizes_bytes, {name: first for name, first in shares_with.items() if name in sizes_bytes})
        for ranks, sizes_bytes in found.items()
    ]


def _storage_of(tensor: torch.Tensor) -> int:
    return storage_id(local(tensor).untyped_storage())


def _kept_alike(ddp: DistributedDataParallel, updated: Collection[int]) -> list[torch.nn.Parameter]:
    """What it has sent to all ranks: of the parameters that optimizers update, by identity, and what is frozen beside
    them. Nothing where none is updated: such a copy of a model may be written on one rank alone."""
    received = received_by(ddp)
    trained = [each for each in received if each.requires_grad and id(each) in updated]
    return [*trained, *(each for each in received if not each.requires_grad)] if trained else []


def content_of(parameters: Container[str], training: Training) -> str:
    """A hash of this rank's part of these, by name, and of what optimizers keep of them now."""
    names = parameter_names(training)
    found = xxhash.xxh3_128()
    for live in live_state(training):
        if _parameter_of(live, names) in parameters and not _is_own(live, training):
            flat = live.tensor.detach().reshape(-1)
            found.update(live.name.encode())
            for start in range(0, flat.numel(), _STRETCH):
                found.update(as_bytes(flat[start : start + _STRETCH].cpu()).numpy())  # type: ignore[arg-type]
    return found.hexdigest()


def modules_divided(training: Training) -> list[torch.nn.Module]:
    """Those that sum gradients over ranks, of parameters that another rank may save."""
    names, savers = parameter_names(training), _savers(training)
    parts = (part for part in _modules(training) if sums_gradients(part))
    return [part for part in parts if any(names.get(id(each)) in savers for each in part.parameters())]


def require_alike(divided: Iterable[torch.nn.Module]) -> None:
    """Raises InputError where what is saved once may now differ by rank."""
    if any(map(may_differ, divided)):
        raise InputError(
            "step: ranks that had parameters alike may not have them so any more: the sum of their gradients is "
            "off or has a hook (set_requires_all_reduce, set_all_reduce_hook, register_comm_hook); have it on from the "
            "last backward pass of an iteration to its step(), or set this before attach"
        )


def elsewhere(training: Training, lives: Iterable[Live]) -> dict[StateName, int]:
    """The state that another rank saves, and which: found by name alone, so that it stays where memory is laid out
    anew, and all ranks find the same."""
    division = training.division
    if division is None:
        return {}
    names = parameter_names(training)
    savers = {live.name: _saver_of(live, training, division, names) for live in lives if live.tensor.numel()}
    return {name: saver for name, saver in savers.items() if saver is not None and saver != division.rank}


def vouched(training: Training, lives: Iterable[Live], *, content: bool) -> int:
    """A number of what this rank takes others to have as it has it, which adds up to 0 over ranks that do.

    Among the ranks that have the same parameters alike, the first gives a hash as often as there are others, and each
    other rank takes it away once. It is of names and who saves them; with `content`, of an element of each tensor,
    which waits for the device.
    """
    division, found = training.division, dict[tuple[int, ...], list[tuple[Live, int]]]()
    if division is None:
        return 0
    names = parameter_names(training)
    for live in lives:
        if (saver := _saver_of(live, training, division, names)) is not None:
            ranks = division.savers[_parameter_of(live, names)]
            found.setdefault(tuple(sorted(ranks)), []).append((live, saver))
    hash_of = _content_hash if content else _names_hash
    return sum(
        hash_of(sorted(alike, key=lambda each: each[0].name)) * (len(ranks) - 1 if division.rank == ranks[0] else -1)
        for ranks, alike in found.items()
    )


def _names_hash(alike: Iterable[tuple[Live, int]]) -> int:
    """Of 48 bits, as the other: 32768 of them add up to what 64 can say."""
    return xxhash.xxh3_64_intdigest("\0".join(f"{live.name} {saver}" for live, saver in alike).encode()) >> 16


def _content_hash(alike: Iterable[tuple[Live, int]]) -> int:
    middles: dict[torch.device, list[torch.Tensor]] = {}
    for live, _ in alike:
        if live.tensor.numel():
            one = live.tensor.detach()[tuple(size // 2 for size in live.tensor.shape)]
            middles.setdefault(one.device, []).append(one.reshape(1).view(torch.uint8))
    found = xxhash.xxh3_64()
    for each in middles.values():
        found.update(torch.cat(each).cpu().numpy())  # type: ignore[arg-type]
    return found.intdigest() >> 16


def shared_out(
    training: Training,
    rank: int,
    shares: Iterable[tuple[Sequence[int], Mapping[str, int]]],
    *,
    entries_stay: bool = False,
) -> Training:
    """The training as this rank saves it, if ranks save `shares`, as of Division.of, once."""
    division = Division.of(rank, shares)
    if division is not None:
        division = replace(_by_storage(division, training), entries_stay=entries_stay)
    return replace(training, division=division)


def _by_storage(division: Division, training: Training) -> Division:
    """The same where one rank saves all parameters that lie in one storage now, as a bucket of them."""
    firsts: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}
    savers = dict(division.savers)
    for name, parameter in parameters_of(training):
        if name in savers:
            savers[name] = firsts.setdefault((_storage_of(parameter), frozenset(savers[name])), savers[name])
    return replace(division, savers=savers)


def saved_here(training: Training) -> list[Live]:
    """What this rank saves. Raises InputError as `live_state` does."""
    lives = live_state(training)
    others = elsewhere(training, lives)
    return [live for live in lives if live.name not in others]


def _saver_of(live: Live, training: Training, division: Division, names: Mapping[int, StateName]) -> int | None:
    """None for what is each rank's own."""
    name = _parameter_of(live, names)
    return None if name not in division.savers or _is_own(live, training) else division.saver_of(name, live.entry)


def _savers(training: Training) -> Mapping[str, tuple[int, ...]]:
    return {} if training.division is None else training.division.savers


def _is_own(live: Live, training: Training) -> bool:
    return live.is_host_scalar or _is_partitioned(live, training)


def _is_partitioned(live: Live, training: Training) -> bool:
    """Whether it is of an optimizer that keeps on this rank what no other has."""
    return live.optimizer is not None and is_zero(training.optimizers[live.optimizer])


def _parameter_of(live: Live, names: Mapping[int, StateName]) -> str:
    """The parameter that it is, or that an optimizer keeps it of; "" for what is neither."""
    return names.get(id(live.held if live.optimizer is None else live.parameter), "")


def _modules(training: Training) -> Iterator[torch.nn.Module]:
    return (part for model in training.models for part in model.modules())
