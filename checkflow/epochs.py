"""Epochs that samplers were told by `set_epoch`: their orders are of them, so they are part of a loader's position."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

_DEPTH = 4  # of samplers within samplers


def samplers_in(sampler: object) -> dict[str, Any]:
    """It, as "", and the samplers within it, by path: "sampler.", "sampler.base."."""
    found: dict[str, Any] = {}

    def look(holder: object, path: str, depth: int) -> None:
        found[path] = holder
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, torch.utils.data.Sampler) and depth:
                look(value, f"{path}{name}.", depth - 1)

    look(sampler, "", _DEPTH)
    return found


def told_in(sampler: object) -> dict[str, Any]:
    """Those of them that are told epochs."""
    return {path: one for path, one in samplers_in(sampler).items() if callable(getattr(one, "set_epoch", None))}


def epochs_of(told: Mapping[str, Any]) -> dict[str, int]:
    """The epoch that each was told, where that can be known."""
    found = {path: _epoch_of(sampler) for path, sampler in told.items()}
    return {path: epoch for path, epoch in found.items() if epoch is not None}


def tell_epochs(told: Mapping[str, Any], epochs: Mapping[str, int]) -> None:
    """Have each be at the epoch that it was."""
    for path, sampler in told.items():  # the outer before the inner, which it may tell, too
        if path in epochs:
            sampler.set_epoch(epochs[path])


def note_epochs(told: Mapping[str, Any]) -> None:
    """Have those that keep no `epoch` say what they are told from now on."""
    for sampler in told.values():
        if _epoch_of(sampler) is None and not isinstance(sampler.set_epoch, _Noted):
            with suppress(AttributeError):  # it has slots
                sampler.set_epoch = _Noted(sampler.set_epoch)


def _epoch_of(sampler: Any) -> int | None:
    for epoch in (getattr(sampler, "epoch", None), getattr(sampler.set_epoch, "told", None)):
        with suppress(TypeError):
            return operator.index(epoch)  # type: ignore[arg-type]
    return None


class _Noted:
    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self.told: object = None

    def __call__(self, epoch: object, *more: object, **named: object) -> object:
        self.told = epoch
        return self._tell(epoch, *more, **named)
