"""A tensor that ranks share (DTensor): what this rank holds of it, and where that lies in the whole.

A checkpoint has this rank's part. Everywhere else a state tensor's `tensor` is the part, a plain tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

from checkflow.torch_ranks import part_of, place_in_whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Place:
    """Of a part: the whole's shape, and by dimension where the part begins there and how many elements it has."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def is_shared(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is one that ranks share."""
    module = sys.modules.get("torch.distributed.tensor")  # where nobody imported it there is none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, the memory itself; of a plain tensor, that."""
    return part_of(tensor) if is_shared(tensor) else tensor


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where this rank's part lies; None of a plain tensor."""
    if not is_shared(tensor):
        return None
    return Place(tuple(tensor.shape), place_in_whole(tensor), tuple(part_of(tensor).shape))


def are_shared_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ranks share both in the same way, or neither, and this one has as much of each."""
    ways = [each.placements if is_shared(each) else None for each in (one, other)]
    return local(one).shape == local(other).shape and ways[0] == ways[1]


def ranks_alike(tensor: torch.Tensor) -> tuple[int, ...]:
    """The ranks, ascending, that have the same part as this one, which is among them; () of a plain tensor, and where
    each has a term of a sum."""
    if not is_shared(tensor) or any(placement.is_partial() for placement in tensor.placements):
        return ()
    here = tensor.device_mesh.get_coordinate()
    if here is None:  # this rank has nothing of it
        return ()
    axes = [
        slice(None) if placement.is_replicate() else slice(at, at + 1)
        for placement, at in zip(tensor.placements, here, strict=True)
    ]
    return tuple(sorted(tensor.device_mesh.mesh[tuple(axes)].flatten().tolist()))


def is_even(tensor: torch.Tensor) -> bool:
    """Whether each rank that shares it has as much of it as any other; of a plain tensor, true."""
    if not is_shared(tensor):
        return True
    parts: dict[int, int] = {}  # dimension -> into how many it is divided
    for axis, placement in enumerate(tensor.placements):
        if isinstance(dimension := getattr(placement, "dim", None), int):
            parts[dimension] = parts.get(dimension, 1) * tensor.device_mesh.size(axis)
    return all(tensor.shape[dimension] % count == 0 for dimension, count in parts.items())


def give_back_gathered(models: Iterable[torch.nn.Module]) -> None:
    """Have FSDP2's modules hold their own part again, where a forward pass has left the whole there.

    The next forward pass gathers it anew.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None:
        for part in (part for model in models for part in model.modules() if isinstance(part, module.FSDPModule)):
            part.reshard()


def shared_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that ranks share as they share another, with this part of it; of a plain one, the part."""
    if not is_shared(like):
        return part
    from torch.distributed.tensor import DTensor

    whole: torch.Tensor = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole
