"""What the driver asks of a worker, and what it answers. They travel pickled over a pipe between the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from contenders import Job


@dataclass(frozen=True, slots=True)
class Prepare:
    """-> Done."""

    prepared: Path


@dataclass(frozen=True, slots=True)
class Build:
    """-> Done. The training, before there is a tool."""


@dataclass(frozen=True, slots=True)
class Attach:
    """-> Done. Builds the training where there is none yet."""

    job: Job


@dataclass(frozen=True, slots=True)
class Train:
    """-> Turn. So many iterations, saved when they are due."""

    iterations: int


@dataclass(frozen=True, slots=True)
class SaveOne:
    """-> Saved. One iteration whose checkpoint is waited for; the interval has to be 1."""


@dataclass(frozen=True, slots=True)
class Restore:
    """-> Restored."""


@dataclass(frozen=True, slots=True)
class Live:
    """-> Done, once dead. In a forked child: attach, restore, train until killed (see lives.py)."""

    job: Job
    diary: Path


@dataclass(frozen=True, slots=True)
class Detach:
    """-> Done. Completes what is on its way."""


@dataclass(frozen=True, slots=True)
class Done:
    state_bytes: int = 0
    version: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Times of each iteration, the tool's calls included, and of those calls and the tool's hooks alone."""

    times_s: tuple[float, ...]
    blocked_s: tuple[float, ...]
    gpu_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """From the end of the update: until training may go on, and until the tool says that all is complete."""

    blocked_s: float
    complete_s: float
    iteration: int
    digest: str


@dataclass(frozen=True, slots=True)
class Restored:
    iteration: int
    attach_s: float
    restore_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The tool raised."""

    message: str


Order = Prepare | Build | Attach | Train | SaveOne | Restore | Live | Detach
Answer = Done | Turn | Saved | Restored | Failed
