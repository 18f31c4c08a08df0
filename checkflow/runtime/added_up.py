"""Gradients that are added up across a `step()`: no checkpoint has them, so a resume from there goes on without them.

An iteration may make no update, as where a scaler skips it. Its gradients are dropped then, or zeroed. Where they are
written to instead, `step()` may be called for each part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkflow.state.live import parameters_of
from checkflow.state.shards import local
from checkflow.torch_internals import versions
from checkflow.training import Training
from checkflow.wrapped import is_hookable


class AddedUp:
    """Tells of it once. Looks at gradients in iterations without an update alone, and in the one after them."""

    def __init__(self, training: Training, tell: Callable[[str], None]) -> None:
        self._training = training
        hooked = all(map(is_hookable, training.optimizers))  # else nobody knows of updates
        self._tell: Callable[[str], None] | None = tell if hooked else None
        self._updated = False  # since the last iteration ended
        self._before: tuple[str, torch.nn.Parameter, tuple[int, int]] | None = None  # whose gradient, and what it was

    def updated(self) -> None:
        """An optimizer has made an update. Its gradients are still there."""
        self._compare()
        self._updated = True

    def ended(self) -> None:
        """An iteration ended."""
        if self._before is not None:
            self._compare()
        if self._updated or self._tell is None:
            self._updated, self._before = False, None
            return
        for name, parameter in parameters_of(self._training):
            if parameter.grad is not None:
                self._before = name, parameter, _address_and_version(parameter.grad)
                break

    def _compare(self) -> None:
        """Another gradient in the same memory begins with a version that is no higher."""
        if self._before is None or self._tell is None:
            return
        name, parameter, before = self._before
        self._before = None
        if parameter.grad is None:
            return
        address, version = _address_and_version(parameter.grad)
        if address == before[0] and version > before[1]:
            self._tell(
                f"{name}: its gradient was written to after a step() without an update; where gradients are added up "
                "there, no checkpoint has them, and a resume goes on without them: call step() once for each update"
            )
            self._tell = None


def _address_and_version(gradient: torch.Tensor) -> tuple[int, int]:
    part = local(gradient)
    return part.data_ptr(), versions([part])[0]
