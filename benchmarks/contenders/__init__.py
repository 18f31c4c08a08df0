"""The tools that are compared. A contender is one file here, found by its name; "_" begins shared parts.

A contender saves the training it is attached to after each `interval`-th iteration into its folder, as its own
documentation recommends, and keeps the newest two checkpoints. On disk it makes them durable wherever it, or the user
with a line or two, can; in memory (the folder is a tmpfs, or the tool has a tier of its own) nothing has to be synced:
those survive a killed trainer and not a lost machine.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import ClassVar

import checkflow

NAMES = tuple(sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")))


class Tier(StrEnum):
    """What a checkpoint survives: MEMORY a killed trainer, DISK a lost machine too."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Job:
    """Where and how often to save."""

    folder: Path
    interval: int
    tier: Tier
    workload: str
    prepared: Path  # what `prepare` left, the same folder for each process of a workload

    def due(self, iteration: int) -> bool:
        return iteration % self.interval == 0


class Contender(abc.ABC):
    """Attached to one training. The driver calls the methods in the training thread and times them."""

    what: ClassVar[str]  # one line: how it is used
    durable: ClassVar[bool]  # whether a checkpoint on disk that it reports as complete survives a power cut
    verifies: ClassVar[bool] = False  # whether a restore finds changed bytes
    prepares: ClassVar[bool] = False  # whether `prepare` does anything
    tiers: ClassVar[tuple[Tier, ...]] = tuple(Tier)
    in_files: ClassVar[bool] = True  # in memory too, of a tmpfs; else in memory of its own

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        self.job = job
        self.training = training

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot run here; None where it can."""
        return None

    @classmethod
    def version(cls) -> str:
        """Of the tool."""
        import torch

        return f"torch {torch.__version__}"

    @classmethod
    def preload(cls) -> None:
        """Import what the module does not: a new process imports its libraries before it builds its model."""
        return

    @classmethod
    def prepare(cls, workload: str, folder: Path) -> None:  # noqa: ARG003
        """What is done once for a workload, in a process of its own."""
        return

    def before_update(self) -> None:  # noqa: B027
        """The optimizer is about to write."""

    def after_update(self) -> None:  # noqa: B027
        """The optimizer has written."""

    @abc.abstractmethod
    def after_iteration(self, iteration: int) -> None:
        """This many iterations are completed."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when all that was begun is complete, as far as the tool can tell; raise what it reports."""

    def close(self) -> None:
        """Complete everything and let go."""
        self.wait()

    def hidden_s(self) -> float:
        """Time spent so far in the tool's own hooks: what the driver cannot time."""
        return 0.0

    @abc.abstractmethod
    def restore(self) -> int:
        """Bring the training back to the newest checkpoint that can be loaded; how many iterations it had, or 0."""


def load(name: str) -> type[Contender]:
    """The contender of that name: the one class that its file defines. Raises KeyError for a name not in NAMES."""
    if name not in NAMES:
        raise KeyError(f"contenders: {name!r} is not known; choose from {', '.join(NAMES)}")
    module = import_module(f"{__name__}.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Contender) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__file__}: one contender, not {len(found)}"
    return found[0]
