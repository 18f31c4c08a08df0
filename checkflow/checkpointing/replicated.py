"""What a training gives its replica to be held to: a digest of its state, of one iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

from checkflow.state.holders import optimizers_of
from checkflow.state.live import live_state
from checkflow.state.names import StateName, holder_of
from checkflow.store.format.layout import Layout
from checkflow.store.memory.replica_slots import only_in_whole
from checkflow.training import Training


def not_torchs_own(training: Training) -> str:
    """The class of an optimizer that only the training has, if there is one."""
    for optimizer in optimizers_of(training).values():
        if getattr(torch.optim, type(optimizer).__name__, None) is not type(optimizer):
            return type(optimizer).__name__
    return ""


def digest_of(training: Training, layouts: Sequence[Layout]) -> str:
    """Of the state that deltas rebuild, as it is now: what the replica has of this iteration has to have it, too."""
    hasher = xxhash.xxh3_128()
    for part in _state_in(training, layouts):
        hasher.update(part)
    return hasher.hexdigest()


def _state_in(training: Training, layouts: Sequence[Layout]) -> Iterator[memoryview]:
    """What deltas rebuild, as it lies in a whole slot."""
    lives = {live.name: live.tensor for live in live_state(training)}
    for file, place in only_in_whole(layouts):
        tensor = lives[StateName.of(holder_of(file), place.spec.name)].detach()
        lying = tensor.permute(place.spec.order or tuple(range(tensor.dim())))
        yield memoryview(lying.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
