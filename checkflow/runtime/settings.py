"""What the user chose of how a schedule is followed, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.runtime.guards import GuardKind


@dataclass(frozen=True, slots=True)
class Settings:
    """See the module. `disarmed`: kinds of guards that do nothing. For tests: it tears checkpoints."""

    interval: int | None = None  # iterations from one checkpoint to the next; None: the schedule's
    wait_when_full: bool = False  # where no slot is free, wait for one
    approximate: bool = False  # what the host's updates make need not be the training's state to the bit
    audit: bool = False  # compare samples of the state for writes that no guard saw
    learns: bool = False  # another schedule follows where the first updates do not make the state that this one has
    disarmed: frozenset[GuardKind] = frozenset()
