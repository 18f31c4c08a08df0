"""What happens to checkpoints, as values: what `attach(on_event=...)` is called with and the logger `checkflow` says.

Each event's text is its line, `metrics` are its figures for a dashboard, `level` is that of its line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from checkflow.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to the checkpoint of an iteration, or while that iteration was the last one completed."""

    level: ClassVar[int] = logging.DEBUG

    iteration: int

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures by name, "checkflow/...", to be drawn at `iteration`."""
        return {}


@dataclass(frozen=True, slots=True)
class Staged(Event):
    """A checkpoint is complete in host memory: a killed trainer no longer loses it."""

    def __str__(self) -> str:
        return f"iteration {self.iteration} is staged"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/staged_iteration": self.iteration}


@dataclass(frozen=True, slots=True)
class Mirrored(Event):
    """A checkpoint is in another machine's memory, too: a lost machine no longer loses it."""

    size_bytes: int
    send_ns: int  # from the slot to the mirror's answer, hashes included

    def __str__(self) -> str:
        size, took = format_bytes(self.size_bytes), format_ns(self.send_ns)
        return f"iteration {self.iteration} is mirrored, {size} in {took}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/mirrored_iteration": self.iteration, "checkflow/mirror_seconds": self.send_ns / 1e9}


@dataclass(frozen=True, slots=True)
class Durable(Event):
    """A checkpoint is on disk: a power cut no longer loses it."""

    size_bytes: int
    write_ns: int  # from the slot to durable, hashes and syncs included

    def __str__(self) -> str:
        size, took = format_bytes(self.size_bytes), format_ns(self.write_ns)
        return f"iteration {self.iteration} is durable, {size} in {took}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/durable_iteration": self.iteration, "checkflow/write_seconds": self.write_ns / 1e9}


@dataclass(frozen=True, slots=True)
class Uploaded(Event):
    """A checkpoint is in the bucket, its manifest last: a lost disk no longer loses it."""

    size_bytes: int
    upload_ns: int  # from the disk to the bucket's answer, hashes included

    def __str__(self) -> str:
        size, took = format_bytes(self.size_bytes), format_ns(self.upload_ns)
        return f"iteration {self.iteration} is uploaded, {size} in {took}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/uploaded_iteration": self.iteration, "checkflow/upload_seconds": self.upload_ns / 1e9}


@dataclass(frozen=True, slots=True)
class Verified(Event):
    """A durable checkpoint was read back, and every hash matched. Of small ones, those alone that are retained."""

    verify_ns: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} is verified, in {format_ns(self.verify_ns)}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/verified_iteration": self.iteration}


@dataclass(frozen=True, slots=True)
class Skipped(Event):
    """An iteration that was due has no checkpoint."""

    reason: str

    def __str__(self) -> str:
        return f"iteration {self.iteration} has no checkpoint: {self.reason}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/skipped_iteration": self.iteration}


@dataclass(frozen=True, slots=True)
class Stalled(Event):
    """Training waited for checkflow for a millisecond or more, since the iteration before."""

    stall_ns: int
    ns_by_cause: Mapping[str, int]

    def __str__(self) -> str:
        causes = ", ".join(f"{cause} {format_ns(time_ns)}" for cause, time_ns in self.ns_by_cause.items())
        return f"iteration {self.iteration} stalled for {format_ns(self.stall_ns)} ({causes})"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/stall_seconds": self.stall_ns / 1e9}


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A training is as it was after `iteration`."""

    level: ClassVar[int] = logging.INFO

    checkpoint: str  # its directory's name
    seconds: float
    skipped: tuple[str, ...]  # newer checkpoints that do not verify, and why
    changed: tuple[str, ...] = ()  # since it was written: code, configuration, data, versions
    replay_seconds: float | None = None  # of these, for updates that were made again; None where none were

    def __str__(self) -> str:
        changed = f"; changed since: {', '.join(self.changed)}" if self.changed else ""
        return f"resumed iteration {self.iteration} from {self.checkpoint} in {self.took}{changed}"

    @property
    def took(self) -> str:
        """In words."""
        again = "" if self.replay_seconds is None else f", {self.replay_seconds:.1f} s of it to make updates again"
        return f"{self.seconds:.1f} s{again}"

    @property
    def metrics(self) -> Mapping[str, float]:
        replay = {} if self.replay_seconds is None else {"checkflow/replay_seconds": self.replay_seconds}
        return {"checkflow/resumed": 1.0, "checkflow/restore_seconds": self.seconds} | replay


@dataclass(frozen=True, slots=True)
class Continued(Event):
    """After a resume the loss goes on where it was."""

    level: ClassVar[int] = logging.INFO

    before: tuple[float, ...]  # losses of the last iterations that the checkpoint holds
    after: tuple[float, ...]

    def __str__(self) -> str:
        after = ", ".join(f"{loss:.4g}" for loss in self.after)
        return f"the loss goes on: {after} after the resume, {min(self.before):.4g} to {max(self.before):.4g} before it"


@dataclass(frozen=True, slots=True)
class Learned(Event):
    """From `iteration` on a schedule is followed that was learned from this run."""

    level: ClassVar[int] = logging.INFO

    interval: int  # iterations from one checkpoint to the next
    peak_bytes: int  # of the device, as planned
    training_peak_bytes: int  # as above, without checkpoints
    lanes: int = 1  # iterations that each checkpoint has a part of
    replica: bool = False  # each iteration sends gradients, with which the host makes the updates, too

    def __str__(self) -> str:
        often = "every iteration" if self.interval == 1 else f"every {self.interval} iterations"
        if self.lanes > 1:
            often += f", with a part from each of {self.lanes},"
        if self.replica:
            often += ", of gradients that the host updates a replica with,"
        more_bytes = self.peak_bytes - self.training_peak_bytes
        adds = f"adds {format_bytes(more_bytes)} to" if more_bytes else "adds nothing to"
        peak = format_bytes(self.training_peak_bytes)
        return f"learned its schedule by iteration {self.iteration}: a checkpoint {often} {adds} a peak of {peak}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/interval_iterations": self.interval, "checkflow/planned_peak_bytes": self.peak_bytes}


@dataclass(frozen=True, slots=True)
class Paced(Event):
    """Checkpoints cost more than they may, or less than they did: from the next one on the interval is another."""

    level: ClassVar[int] = logging.INFO

    interval: int  # iterations from one checkpoint to the next
    before: int  # what that was
    overhead: float  # measured: for how long training waited, a fraction of the time that it took otherwise
    budget: float  # likewise, what it may be

    def __str__(self) -> str:
        return (
            f"a checkpoint every {self.interval} iterations, before {self.before}: they held training up for "
            f"{self.overhead:.1%} of its time, and may for {self.budget:.1%}"
        )

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/interval_iterations": self.interval, "checkflow/overhead": self.overhead}


@dataclass(frozen=True, slots=True)
class Doubted(Event):
    """What was checked after a resume, in the state or in the first losses, and is surprising."""

    level: ClassVar[int] = logging.WARNING

    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A promise is broken; the message is that of the error which is raised, or told under on_error="warn"."""

    level: ClassVar[int] = logging.ERROR

    message: str

    def __str__(self) -> str:
        return self.message

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"checkflow/failed": 1.0}
