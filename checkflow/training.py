"""The one type that a model file returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Training:
    """What to compile: model(s), optimizer(s), and a function that runs one whole iteration on a representative batch.

    The iteration covers forward, backward and update; what it returns is ignored.
    """

    model: torch.nn.Module | Sequence[torch.nn.Module]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    iteration: Callable[[], object]

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        return (self.model,) if isinstance(self.model, torch.nn.Module) else tuple(self.model)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return (self.optimizer,) if isinstance(self.optimizer, torch.optim.Optimizer) else tuple(self.optimizer)
