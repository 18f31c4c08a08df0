"""Which parameters have a gradient. A checkpoint has none of them, but to an optimizer one of zeros is not as none: it
lets averages decay, and moves the weights.

Where a training zeroes them in place, when an iteration ends or when one begins, those of layers that an iteration
passes by are zeros in it. So a restore makes each one that was there one of zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from checkflow.state.live import parameters_of
from checkflow.state.names import StateName
from checkflow.training import Training

_Named = Iterable[tuple[StateName, torch.nn.Parameter]]


class GradientReader:
    """Reads it at each checkpoint; names are listed anew only where it is otherwise than before."""

    def __init__(self) -> None:
        self._known: list[bool] = []
        self._named: _Named = ()
        self._names: tuple[str, ...] = ()

    def read(self, named: _Named) -> tuple[str, ...]:
        """Parameters that have one; the same object where nothing changed."""
        known = [parameter.grad is not None and _is_dense(parameter.grad) for _, parameter in named]
        if known != self._known or named is not self._named:
            self._known, self._named = known, named
            self._names = tuple(str(name) for (name, _), there in zip(named, known, strict=True) if there)
        return self._names


def set_to_zeros(training: Training, names: Collection[str]) -> None:
    """Give these parameters gradients of zeros, in the memory of those that are there, and the others none."""
    for name, parameter in parameters_of(training):
        there = parameter.grad
        if name not in names:
            parameter.grad = None
        elif there is not None and _is_dense(there) and not there.is_inference():
            there.detach().zero_()  # a captured graph may write to it
        else:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def _is_dense(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided
