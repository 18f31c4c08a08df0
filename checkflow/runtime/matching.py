"""The schedule's state rows matched with the live tensors. Addresses change, so this is done anew when one did.

Optimizer state that does not exist yet is absent, not wrong: optimizers create it in their first update. At attach a
difference is refused; later on only what no slot has room for is, and all else is read when the iteration ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from checkflow.dtypes import name_of
from checkflow.errors import InputError
from checkflow.runtime.binding import Binding, BoundStorage, Segment, Target, lanes_of
from checkflow.schedule import Schedule, StateRow, ViewRow
from checkflow.state import refused
from checkflow.state.divided import elsewhere
from checkflow.state.host.json_values import MAX_TENSOR_BYTES
from checkflow.state.live import Live, entry_stems, live_state, parameter_names
from checkflow.state.memory import memory_order
from checkflow.state.names import StateName, nearest, owner
from checkflow.state.shards import local, tie_of
from checkflow.training import Training

_ADVICE = "make such a change before attach; a compiled schedule has to be of this very training"
_SINCE_ATTACH = "make such a change before attach: close, and attach anew with start_over=True"
_UNPLANNED = -1  # BoundStorage.id of what no row of the schedule has


@dataclass(frozen=True, slots=True)
class _Ours:
    """What the training has now. `rooms`: as they were bound first; None where this is the first time."""

    lives: Mapping[StateName, Live]
    parameters: Mapping[StateName, torch.nn.Parameter]  # by what the names of their entries begin with
    asked: Collection[str]  # holders of objects, which are asked when an iteration ends
    device: torch.device
    rooms: Mapping[StateName, Target] | None
    absent: frozenset[StateName]  # of them, what never existed yet


@dataclass(frozen=True, slots=True)
class _Match:
    """What a row of the schedule, or state that it lacks, adds to the binding."""

    rooms: Mapping[StateName, Target] = field(default_factory=dict)  # those that are new
    absent: Sequence[StateName] = ()
    storage: BoundStorage | None = None
    loose: Sequence[Live] = ()


def bind(schedule: Schedule, training: Training, fixed: Binding | None = None) -> Binding:
    """Match rows and tensors. With `fixed`, the targets stay as they were bound first.

    Raises InputError that names the first difference between the schedule and the training. With `fixed`, only for what
    no slot has room for: another shape or dtype, or new state.
    """
    found = live_state(training)
    others = elsewhere(training, found)
    lives = {live.name: live for live in found if live.name not in others}
    ours = _Ours(
        lives,
        parameters={stem: parameter for of_one in entry_stems(training) for stem, parameter in of_one.items()},
        asked=training.listed.objects.keys(),
        device=refused.device_of(live.tensor for live in lives.values()),
        rooms=None if fixed is None else fixed.targets,
        absent=frozenset() if fixed is None else fixed.absent,
    )
    scheduled = {view.name for row in schedule.state for view in row.views}
    targets = dict(fixed.targets) if fixed is not None else {}
    _check_savers(others, scheduled | targets.keys())
    storages: dict[int, BoundStorage] = {}
    hosted: list[BoundStorage] = []
    loose: list[Live] = []
    absent: list[StateName] = []
    for match in chain((_planned(row, ours) for row in schedule.state), _unplanned(ours, scheduled)):
        targets |= match.rooms
        absent += match.absent
        loose += match.loose
        storage = match.storage
        if storage is not None and _is_hosted(storage, ours.device):
            hosted.append(storage)
        elif storage is not None:
            storages[storage.id] = storage
    if fixed is not None:  # nothing is refused any more, so what was bound may change
        known = {storage.name: storage for storage in fixed.storages.values()}
        storages = {id_: _same(storage, known.get(storage.name)) for id_, storage in storages.items()}
    return Binding.of(
        training,
        lives.values(),
        storages,
        device=ours.device,
        hosted=tuple(hosted),
        loose=tuple(loose),
        absent=frozenset(absent),
        targets=targets,
        lanes=lanes_of(schedule),
    )


def check_rebuilt(schedule: Schedule, training: Training) -> None:
    """Raises InputError for state that is saved as it was in an earlier iteration, and that no gradient brings on."""
    rebuilt = schedule.rebuilt() if schedule.slot_lanes > 1 else {row.tensor for row in schedule.actions if row.back}
    names = parameter_names(training)
    by_stem = {stem: names[id(each)] for of_one in entry_stems(training) for stem, each in of_one.items()}
    consumed = {row.parameter.name for row in schedule.gradients}
    for row in schedule.state:
        first = StateName(row.views[0].name)
        if row.id in rebuilt and consumed.isdisjoint((*(view.name for view in row.views), owner(first, by_stem))):
            raise InputError(
                f"schedule: {first} is saved as it was in an earlier iteration, and no gradient of the schedule "
                "rebuilds it; compile it again"
            )


def _planned(row: StateRow, ours: _Ours) -> _Match:
    """A row: bound where its bytes can go to the slots as planned."""
    rooms, absent = _of_absent(row, ours)
    found = [_checked(view, ours) for view in row.views if view.name in ours.lives]
    if not found:
        return _Match(rooms, absent)
    if ours.rooms is None:
        rooms |= rooms_of(found)
    known = rooms if ours.rooms is None else ours.rooms
    problem = _misfit(row, found, known)
    extra = all(live.name.is_extra for live in found)
    if problem is None and (row.written or not extra):  # of extra that was not, nothing may tell that it is after all
        return _Match(rooms, absent, _bound(row.id, row.written, found, known))
    if ours.rooms is None and not extra and any(live.optimizer is None for live in found):
        raise InputError(f"{problem}; {_ADVICE}")
    _check_tied(found, known)
    return _Match(rooms, absent, loose=found)


def _of_absent(row: StateRow, ours: _Ours) -> tuple[dict[StateName, Target], list[StateName]]:
    """Rooms for those of a row's names that no tensor has now, and which of them no optimizer has made yet."""
    rooms: dict[StateName, Target] = {}
    absent: list[StateName] = []
    for view in row.views:
        if view.name in ours.lives:
            continue
        name = StateName(view.name)
        asked = name.holder in ours.asked
        if ours.rooms is None:
            order = _logical(view.shape)
            if not asked:
                _check_absent(name, ours.lives)
                order = _expected(view, ours.parameters)
            rooms[name] = Target(name, view.dtype, view.shape, order)
        elif not asked and not name.is_optimizers:
            raise _missing(name, ours.lives, _SINCE_ATTACH)
        if not asked and (ours.rooms is None or name in ours.absent):
            absent.append(name)
    return rooms, absent


def _unplanned(ours: _Ours, scheduled: Collection[str]) -> Iterator[_Match]:
    """State that the schedule lacks: read when the iteration ends, where a slot has room for it, or can have."""
    more = [live for live in ours.lives.values() if live.name.is_extra and live.name not in scheduled]
    if ours.rooms is None:
        yield _Match(rooms_of(more))
    for live in ours.lives.values():
        if live.name in scheduled or live.is_host_scalar:
            continue
        new = ours.rooms is not None and live.name not in ours.rooms
        if new and (_small(live) or not live.tensor.numel()):
            continue  # the host's record takes it, or there is nothing to take
        if live.name.is_extra and not new:
            yield _Match(loose=[live])
            continue
        _check_unscheduled(live, ours.device, scheduled, new=new)
        rooms = rooms_of([live]) if ours.rooms is None else {}
        known = rooms if ours.rooms is None else ours.rooms
        if memory_order(live.tensor) == known[live.name].order:
            yield _Match(rooms, storage=_bound(_UNPLANNED, False, [live], known))
        else:
            yield _Match(rooms, loose=[live])


def _check_savers(others: Mapping[StateName, int], planned: Collection[str]) -> None:
    """Who saves what never changes: what slots have room for would keep the bytes that it had."""
    for name, rank in others.items():
        if name in planned:
            raise InputError(f"{name}: in the schedule of this rank, but rank {rank} saves it; {_ADVICE}")


def _is_hosted(storage: BoundStorage, device: torch.device) -> bool:
    """Whether it is copied when the iteration ends: beside a CUDA training, or not in the schedule."""
    return storage.id == _UNPLANNED or (device.type == "cuda" and storage.data.device.type == "cpu")


def check_updated(binding: Binding, training: Training, number: int) -> None:
    """After optimizer `number` made an update: raises InputError if state that its parameters should have is absent."""
    if not binding.absent:
        return
    parameters = entry_stems(training)[number]
    for name in sorted(binding.absent):
        parameter = owner(name, parameters)
        if parameter is not None and parameter.grad is not None:
            entries = (live.name for live in live_state(training) if live.parameter is parameter)
            close = nearest(name, entries)
            raise InputError(f"{name}: in the schedule, but this optimizer has no such state{close}; {_ADVICE}")


def _check_absent(name: StateName, lives: Mapping[StateName, Live]) -> None:
    """Optimizer state may come later, unless its parameter already has other state; under a text, at any time."""
    if name.is_own:
        return
    above = next(name.above(), name)
    if not name.is_optimizers or any(other.is_inside(above) for other in lives):
        raise _missing(name, lives)


def _missing(name: StateName, lives: Mapping[StateName, Live], advice: str = _ADVICE) -> InputError:
    key = name.listed_as
    if key is not None and not any(other.holder == name.holder for other in lives):
        return InputError(f'{name.holder}: in the schedule; list it: attach(extra={{"{key}": ...}})')
    return InputError(f"{name}: in the schedule, but not in this training{nearest(name, lives)}; {advice}")


def _checked(view: ViewRow, ours: _Ours) -> Live:
    live = ours.lives[StateName(view.name)]
    here = tuple(live.tensor.shape), name_of(live.tensor.dtype)
    for what, now, planned in zip(("shape", "dtype"), here, (view.shape, view.dtype), strict=True):
        if now != planned and ours.rooms is None:
            raise InputError(f"{view.name}: has {what} {now}, {planned} in the schedule; {_ADVICE}")
        if now != planned:
            formed = ", after one forward pass where that makes it so" if live.buffer else ""
            raise InputError(f"{view.name}: has {what} {now}, and had {planned}; {_SINCE_ATTACH}{formed}")
    return live


def rooms_of(lives: Sequence[Live]) -> dict[StateName, Target]:
    """In the slots. Tied names of a model share one; an optimizer's do not, for it may part them at any time."""
    rooms: dict[StateName, Target] = {}
    same: dict[tuple[object, ...], StateName] = {}
    for live in lives:
        tensor, shape = live.tensor, tuple(live.tensor.shape)
        order = memory_order(tensor)
        first = live.name
        if live.optimizer is None:
            first = same.setdefault((live.name.holder, *tie_of(live.held)), live.name)
        alias_of = None if first == live.name else first
        rooms[live.name] = Target(live.name, name_of(tensor.dtype), shape, order or _logical(shape), alias_of)
    return rooms


def _logical(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dimensions that a contiguous tensor has."""
    return tuple(range(len(shape)))


def _misfit(row: StateRow, lives: Sequence[Live], targets: Mapping[StateName, Target]) -> str | None:
    """Why bytes cannot go from the storage to the slots as planned."""
    whole = lives[0].tensor.untyped_storage()
    for live in lives:
        if live.tensor.untyped_storage().data_ptr() != whole.data_ptr():
            return f"{live.name}: tied to {lives[0].name} in the schedule, but not in this training"
        if memory_order(live.tensor) != targets[live.name].order:
            return f"{live.name}: its memory format changed"
    if whole.nbytes() != row.bytes:
        return f"{lives[0].name}: its storage has {whole.nbytes()} bytes, {row.bytes} in the schedule"
    return None


def _check_tied(lives: Sequence[Live], targets: Mapping[StateName, Target]) -> None:
    """Names that share a room have to stay one tensor."""
    by_name = {live.name: live.held for live in lives}
    for live in lives:
        other = by_name.get(targets[live.name].alias_of or live.name)
        if other is None or tie_of(other) != tie_of(live.held):
            raise InputError(
                f"{live.name}: was tied to {targets[live.name].alias_of} at attach, and is no longer; attach it untied"
            )


def _bound(id_: int, written: bool, lives: Sequence[Live], targets: Mapping[StateName, Target]) -> BoundStorage:
    first = lives[0].tensor
    whole = first.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=first.device).set_(whole, 0, (whole.nbytes(),), (1,))
    segments: list[Segment] = []
    for live in lives:
        tensor = live.tensor
        start = int(tensor.storage_offset()) * tensor.element_size()
        if targets[live.name].alias_of is None:
            segments.append(Segment(start, tensor.numel() * tensor.element_size(), live.name))
    counting = dict.fromkeys(tensor for live in lives for tensor in (live.held, live.tensor))  # shared ones have two
    counted = tuple(tensor for tensor in counting if not tensor.is_inference())
    return BoundStorage(id_, lives[0].name, written, data, whole.data_ptr(), tuple(lives), tuple(segments), counted)


def _same(storage: BoundStorage, old: BoundStorage | None) -> BoundStorage:
    """The storage that was bound before, where it is the same one: an offload may be reading it."""
    if old is None or old.address != storage.address or old.data.numel() != storage.data.numel():
        return storage
    old.lives, old.segments, old.counted = storage.lives, storage.segments, storage.counted
    return old


def _small(live: Live) -> bool:
    """Whether new optimizer state is little enough for the host's record."""
    return live.optimizer is not None and live.tensor.numel() * live.tensor.element_size() <= MAX_TENSOR_BYTES


def _check_unscheduled(live: Live, device: torch.device, scheduled: Collection[str], *, new: bool) -> None:
    on_host = device.type == "cuda" and live.tensor.device.type == "cpu"
    if live.tensor.numel() and (new or not (on_host and live.optimizer is None)):
        since = "appeared after attach and is" if new else "is state of this training, but"
        advice = _SINCE_ATTACH if new else _ADVICE
        raise InputError(f"{live.name}: {since} not in the schedule{nearest(live.name, scheduled)}; {advice}")


def _expected(view: ViewRow, parameters: Mapping[StateName, torch.nn.Parameter]) -> tuple[int, ...]:
    """The memory order that optimizer state will have: its parameter's, where shapes agree."""
    found = owner(StateName(view.name), parameters)
    parameter = None if found is None else local(found)
    order = memory_order(parameter) if parameter is not None and tuple(parameter.shape) == view.shape else None
    return order if order is not None else _logical(view.shape)
