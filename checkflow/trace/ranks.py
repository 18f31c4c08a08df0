"""One process in the place of rank r of n: what code finds under torchrun, over a group that moves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from checkflow.errors import InputError, ModelFileError, TraceError
from checkflow.spelling import option
from checkflow.state.divided import alike_in, saved_here, shared_out
from checkflow.state.holders import optimizers_of
from checkflow.state.live import walk
from checkflow.state.shards import is_even
from checkflow.torch_ranks import join_fake_group, leave_group
from checkflow.trace.execution import user_line
from checkflow.trace.fake_groups import over_fake_groups
from checkflow.trace.recorder import Recorder
from checkflow.trace.replaced import replaced
from checkflow.trace.values import Values
from checkflow.training import Training
from checkflow.wrapped import is_zero

_MOST = 1 << 20  # ranks: torch lists them, and a number of twenty digits is a slip


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many ranks is traced; if `divided`, each saves a share of what they have alike; `entries_stay`: see
    Division.

    Raises InputError for a rank that there is not.
    """

    size: int
    rank: int = 0
    divided: bool = False
    entries_stay: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= _MOST:
            raise InputError(f"{option('world_size', self.size)}: is no number of ranks; give one from 1 to {_MOST}")
        if not 0 <= self.rank < self.size:
            raise InputError(
                f"{option('rank', self.rank)}: is none of the {self.size} ranks; give one from 0 to {self.size - 1}"
            )


def world_of(size: int | None, rank: int | None, *, divided: bool, entries_stay: bool = False) -> World | None:
    """What was asked for; None where that is one process by itself. Raises InputError for a rank that there is not."""
    if size is not None:
        return World(size, rank or 0, divided, entries_stay)
    if rank is not None:
        raise InputError(f"{option('rank', rank)}: of how many is not said; give {option('world_size')}, too")
    if divided:
        raise InputError(
            f"{option('divided', True)}: among how many ranks is not said; give {option('world_size')}, too"
        )
    return None


@contextmanager
def in_place_of(world: World | None) -> Iterator[None]:
    """Within, torch.distributed is initialized and the environment torchrun's, as on that rank; None changes nothing.

    Raises InputError where this process has a process group already; ModelFileError where code within makes one.
    """
    if world is None:
        yield
        return
    if not torch.distributed.is_available():
        raise InputError(f"{option('world_size')}: this build of torch has no torch.distributed; install one that has")
    if torch.distributed.is_initialized():
        raise InputError(
            f"{option('world_size')}: this process is a rank already; compile before init_process_group, or elsewhere"
        )
    with ExitStack() as undo:
        undo.enter_context(_environment(world))
        join_fake_group(world.rank, world.size)
        undo.callback(leave_group)
        undo.enter_context(replaced(torch.distributed, "init_process_group", _refuse))
        yield


def _refuse(*_args: object, **_kwargs: object) -> None:
    raise ModelFileError(
        f"{user_line()}: calls init_process_group, which {option('world_size')} has done; call it only where "
        "torch.distributed.is_initialized() is false"
    )


def divided(training: Training, world: World, model: str) -> Training:
    """The training with who saves what of all that ranks have alike, as attach divides it where they share a disk.

    Raises TraceError where there is nothing to divide, or too little for each to have a share.
    """
    shares = [(alike.ranks, alike.sizes_bytes) for alike in alike_in(training)]
    share = partial(shared_out, training, shares=shares, entries_stay=world.entries_stay)
    found = share(world.rank)
    if found.division is None:
        raise TraceError(
            f"{model}: {option('divided', True)}: its ranks have nothing alike that is known to stay so, or not a "
            "parameter for each; leave it out"
        )
    sharing = set.intersection(*(set(ranks) for ranks, _ in shares))
    if not all(saved_here(share(rank)) for rank in sharing):
        raise TraceError(f"{model}: {option('divided', True)}: there is less than a share for each rank; leave it out")
    return found


def share_of(training: Training, world: World) -> str:
    """For a person: whether the other ranks' parts are as large as this one's, so that one schedule does for all."""
    each = f"compile each {option('rank')}"
    if world.divided:
        return f"each of the {world.size} ranks saves a share of its own: {each}"
    uneven = [live.name for live in walk(training) if not is_even(live.held)]
    holders = [holder for holder, optimizer in optimizers_of(training).items() if is_zero(optimizer)]
    if holders:
        return f"{holders[0]}: each of the {world.size} ranks keeps state of other parameters; {each}"
    if not uneven:
        return f"each of the {world.size} ranks holds as much: one schedule does for all that run the same code"
    more = f" and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    return f"{uneven[0]}{more}: other ranks may hold less or more of it than rank {world.rank}; {each}"


@contextmanager
def as_ranks(recorder: Recorder, values: Values) -> Iterator[None]:
    """Within, what FSDP2, tensor parallelism and DistributedDataParallel do runs over the fake group, and is seen."""
    with _seeing_resizes(recorder), over_fake_groups(values, recorder.ledger):
        yield


@contextmanager
def _seeing_resizes(recorder: Recorder) -> Iterator[None]:
    """Within, a recorder is told of storages that code resizes itself: no operator does when FSDP2 frees parameters."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        before_bytes = storage.nbytes()
        original(storage, size)
        recorder.resized(storage, before_bytes)
        return storage

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def _environment(world: World) -> Iterator[None]:
    """The first rank of this machine is the only one: there may be no device for another."""
    here: Mapping[str, object] = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    before = {name: os.environ.get(name) for name in here}
    os.environ.update({name: str(value) for name, value in here.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
