"""The one type that a model file returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from checkflow.division import Division
from checkflow.extra import Extra
from checkflow.wrapped import optimizers_in, unwrapped


@dataclass(frozen=True)
class Training:
    """What to compile.

    Attributes:
        model: one, or all of them.
        optimizer: one, or all of them.
        iteration: runs one whole iteration, forward, backward and update, on a representative batch. What it returns is
            ignored.
        extra: what else it carries from one iteration to the next, by name: modules, tensors, dicts, objects with
            state_dict and load_state_dict.
        division: attach's, of what all ranks have alike; None: this one saves all of its own.
    """

    model: torch.nn.Module | Sequence[torch.nn.Module]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    iteration: Callable[[], object]
    extra: Mapping[str, object] = field(default_factory=dict)
    division: Division | None = field(default=None, kw_only=True, repr=False)

    @cached_property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """All of them, without known wrappers."""
        given = (self.model,) if isinstance(self.model, torch.nn.Module) else tuple(self.model)
        return tuple(map(unwrapped, given))

    @cached_property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All of them, and those that they hold."""
        given = (self.optimizer,) if isinstance(self.optimizer, torch.optim.Optimizer) else tuple(self.optimizer)
        return tuple(dict.fromkeys(found for one in given for found in optimizers_in(one)))

    @cached_property
    def listed(self) -> Extra:
        """`extra` by kind. Raises InputError for what cannot be taken."""
        return Extra.of(self.extra)
