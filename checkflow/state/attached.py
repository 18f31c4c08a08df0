"""Which trainings are attached in this process, and what to each: what one of them holds, none has forgotten."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkflow.training import Training


@dataclass(frozen=True, eq=False)
class Attached:
    """From its making until `end`, or until nobody has it any more.

    Attributes:
        training: its models, optimizers and what it lists.
        beside: schedulers, loaders, generators and the like that are attached, by name.
        store: the directory that has its checkpoints, resolved.
        doubt: to be called where another training was refused that store: it may be trained in the place of this one.
    """

    training: Training
    beside: Mapping[str, object]
    store: Path
    doubt: Callable[[], None]

    def __post_init__(self) -> None:
        _here.add(self)

    def end(self) -> None:
        """It is attached no longer."""
        _here.discard(self)


_here: weakref.WeakSet[Attached] = weakref.WeakSet()


def attached_here() -> tuple[Attached, ...]:
    """All that are now."""
    return tuple(_here)
