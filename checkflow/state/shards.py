"""A tensor that ranks share (DTensor): what this rank holds of it, and where that lies in the whole.

A checkpoint has this rank's part. Everywhere else a state tensor's `tensor` is the part, a plain tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

from checkflow.state.memory import has_storage, identity
from checkflow.torch_ranks import part_of, place_in_whole, stretches_of

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


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of it; None where there is none, or one that has no memory of its own, as sparse ones."""
    gradient = None if parameter.grad is None else local(parameter.grad)
    return gradient if gradient is not None and has_storage(gradient) else None


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where this rank's part lies; None of a plain tensor."""
    if not is_shared(tensor):
        return None
    return Place(tuple(tensor.shape), place_in_whole(tensor), tuple(part_of(tensor).shape))


def lowest_of(tensor: torch.Tensor) -> int | None:
    """The lowest of the ranks that share it; None of a plain tensor."""
    return int(tensor.device_mesh.mesh.min()) if is_shared(tensor) else None


def is_block(tensor: torch.Tensor) -> bool:
    """Whether this rank's part is one block of the whole, and as large as its placements say; of a plain tensor, true.

    A part of another form has no place that a checkpoint could say.
    """
    if not is_shared(tensor) or not (sizes := part_of(tensor).shape).numel():
        return True
    stretches = [stretches_of(tensor, dimension) for dimension in range(tensor.dim())]
    return len(sizes) == tensor.dim() and all(
        len(found) == 1 and len(found[0]) == size for found, size in zip(stretches, sizes, strict=True)
    )


def fill(shape: tuple[int, ...], places: Collection[Place]) -> bool:
    """Whether parts have each element of a tensor of this shape, and each once."""
    held = [place for place in places if 0 not in place.sizes]
    if any(len(place.offsets) != len(shape) or len(place.sizes) != len(shape) for place in held):
        return False
    ends = [tuple(map(sum, zip(place.offsets, place.sizes, strict=True))) for place in held]
    if any(end > extent for each in ends for end, extent in zip(each, shape, strict=True)):
        return False
    if sum(math.prod(place.sizes) for place in held) != math.prod(shape):
        return False
    if not shape:
        return True
    along = max(range(len(shape)), key=lambda dimension: len({place.offsets[dimension] for place in held}))
    begun: list[tuple[Place, tuple[int, ...]]] = []  # and not ended, along the dimension that most divide
    for place, end in sorted(zip(held, ends, strict=True), key=lambda each: each[0].offsets[along]):
        begun = [each for each in begun if each[1][along] > place.offsets[along]]
        for other, others_end in begun:
            bounds = zip(place.offsets, end, other.offsets, others_end, strict=True)
            if all(start < its_end and its_start < stop for start, stop, its_start, its_end in bounds):
                return False
        begun.append((place, end))
    return True


def tie_of(held: torch.Tensor) -> tuple[object, ...]:
    """The same for two names of one model that are tied, while both tensors are held.

    Of what ranks share, and of what has no elements, those are tied that hold the very tensor: by memory they would be
    tied otherwise on a rank whose part is empty. Of all else, those that are the same memory, read the same way.
    """
    return ("held", id(held)) if is_shared(held) or not held.numel() else identity(held)


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
