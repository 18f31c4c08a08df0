"""When DistributedDataParallel next gives every rank the first one's buffers.

It does so before a forward pass, but for one that follows an evaluation, or micro-batches without an update. A new one
always begins with it, where the ranks of a run that was not interrupted keep their own for that pass, or for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel


def shares_buffers_next(models: Iterable[torch.nn.Module]) -> list[bool]:
    """Of those that are such ones, in order."""
    return [model.require_forward_param_sync for model in _replicated(models)]


def share_buffers_next(models: Iterable[torch.nn.Module], kept: Sequence[bool]) -> None:
    """As it was; nothing where the models were distributed otherwise then."""
    found = _replicated(models)
    if len(found) == len(kept):
        for model, shares in zip(found, kept, strict=True):
            model.require_forward_param_sync = shares


def _replicated(models: Iterable[torch.nn.Module]) -> list[DistributedDataParallel]:
    return [model for model in models if isinstance(model, DistributedDataParallel)]
