"""Of the state that all ranks have alike, what this rank saves, and what others do.

Alike are the parameters of DistributedDataParallel, which makes them so and keeps them so, and what optimizers keep of
them. All else is each rank's own: buffers, what was listed, random generators, what is on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn.parallel import DistributedDataParallel

from checkflow.division import Division
from checkflow.state.live import Live, live_state, parameters_of
from checkflow.state.names import StateName
from checkflow.state.shards import is_shared
from checkflow.torch_internals import kept_alike, storage_id
from checkflow.training import Training


def modules_alike(training: Training) -> list[DistributedDataParallel]:
    """The modules that are the same on all ranks, in order."""
    parts = (part for model in training.models for part in model.modules())
    return [part for part in parts if isinstance(part, DistributedDataParallel)]


def sizes_alike(training: Training) -> dict[str, int]:
    """The bytes of each parameter that ranks have alike, by name."""
    alike = {id(parameter) for ddp in modules_alike(training) for parameter in kept_alike(ddp)}
    return {
        str(name): parameter.numel() * parameter.element_size()
        for name, parameter in parameters_of(training)
        if id(parameter) in alike and parameter.numel() and not is_shared(parameter)
    }


def elsewhere(training: Training, lives: Sequence[Live]) -> dict[StateName, int]:
    """The state that another rank saves, and which. What shares a storage is saved by one rank."""
    division = training.division
    if division is None:
        return {}
    names = {id(parameter): name for name, parameter in parameters_of(training)}
    by_storage: dict[int, list[Live]] = {}
    for live in lives:
        if live.tensor.numel():
            by_storage.setdefault(storage_id(live.tensor.untyped_storage()), []).append(live)
    found: dict[StateName, int] = {}
    for sharing in by_storage.values():
        savers = [_saver_of(live, division, names) for live in sharing]
        if None not in savers and savers[0] != division.rank:
            found |= dict.fromkeys((live.name for live in sharing), savers[0])  # type: ignore[arg-type]
    return found


def saved_here(training: Training) -> list[Live]:
    """What this rank saves. Raises InputError as `live_state` does."""
    lives = live_state(training)
    others = elsewhere(training, lives)
    return [live for live in lives if live.name not in others]


def _saver_of(live: Live, division: Division, names: Mapping[int, StateName]) -> int | None:
    """None for what is each rank's own."""
    parameter = live.held if live.optimizer is None else live.parameter
    name = names.get(id(parameter), "")
    if name not in division.places or live.is_host_scalar:
        return None
    return division.saver_of(name, live.entry)
