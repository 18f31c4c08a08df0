"""Attaching to a store that a Checkpointer of this process has, as a notebook's cell does that is run again.

The loop that follows may train the models that were refused, and call that Checkpointer's `step()`: it has the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from checkflow.errors import StoreBusyError
from checkflow.state.attached import attached_here
from checkflow.training import Training


@contextmanager
def refusing(model: torch.nn.Module | Sequence[torch.nn.Module], store: str | Path) -> Iterator[None]:
    """Inside, these are attached. Where a Checkpointer has the store, but not them, that is said, and it is told."""
    try:
        yield
    except StoreBusyError as error:
        place = Path(store).resolve()
        for attached in attached_here():
            models = [model] if isinstance(model, torch.nn.Module) else model
            if place in (attached.store, *attached.store.parents) and _are_others(models, attached.training):
                attached.doubt()
                raise StoreBusyError(
                    f"{error}; it checkpoints another model than this one, and what is trained now is in no checkpoint"
                ) from None
        raise


def _are_others(models: Sequence[torch.nn.Module], than: Training) -> bool:
    """Whether something is trained of these that is none of that training's."""
    had = {id(parameter) for model in than.models for parameter in model.parameters()}
    trained = (parameter for model in models for parameter in model.parameters() if parameter.requires_grad)
    return any(id(parameter) not in had for parameter in trained)
