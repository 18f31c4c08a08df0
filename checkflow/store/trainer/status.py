"""How far a run's checkpoints are, told apart: staged, durable, verified."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

from checkflow.events import Durable, Event, Failed, Mirrored, Staged, Uploaded, Verified

MOST_EVENTS = 10_000  # that wait to be told; the oldest are dropped


@dataclass(frozen=True, slots=True)
class Status:
    """Counters since the store was opened; iterations are None before the first."""

    staged_iteration: int | None
    durable_iteration: int | None
    verified_iteration: int | None
    staged: int
    durable: int
    mirrored_iteration: int | None
    mirrored: int  # in another machine's memory, too
    mirrored_bytes: int  # that went over the network
    mirror_ns: int
    uploaded_iteration: int | None  # the bucket has it
    uploaded: int
    uploaded_bytes: int
    upload_ns: int
    verified: int  # read back; of small ones that were settled together, those that are retained
    skipped: int  # iterations that found no slot free
    blocked_ns: int  # the training loop waited for a slot
    written_bytes: int
    write_ns: int
    verify_ns: int
    pruned: int
    restarts: int  # of the saver, after it died
    errors: int

    @property
    def lag_iterations(self) -> int | None:
        """Iterations that only host memory has; None before the first durable checkpoint."""
        if self.staged_iteration is None or self.durable_iteration is None:
            return None
        return self.staged_iteration - self.durable_iteration

    @property
    def write_bytes_per_s(self) -> int:
        """From a slot to durable, hashes and syncs included; 0 before the first."""
        return self.written_bytes * 10**9 // self.write_ns if self.write_ns else 0

    @property
    def mirror_bytes_per_s(self) -> int:
        """From a slot to the mirror's answer, hashes included; 0 before the first."""
        return self.mirrored_bytes * 10**9 // self.mirror_ns if self.mirror_ns else 0


@dataclass(slots=True)
class Tally:
    """The one mutable count behind Status; what is counted one by one is an event, too."""

    staged_iteration: int | None = None
    durable_iteration: int | None = None
    verified_iteration: int | None = None
    mirrored_iteration: int | None = None
    mirrored: int = 0
    mirrored_bytes: int = 0
    mirror_ns: int = 0
    uploaded_iteration: int | None = None
    uploaded: int = 0
    uploaded_bytes: int = 0
    upload_ns: int = 0
    staged: int = 0
    durable: int = 0
    verified: int = 0
    skipped: int = 0
    blocked_ns: int = 0
    written_bytes: int = 0
    write_ns: int = 0
    verify_ns: int = 0
    pruned: int = 0
    restarts: int = 0
    errors: int = 0
    last_persist_s: float = 0.0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))

    def stage(self, iteration: int) -> None:
        self.staged += 1
        self.staged_iteration = iteration
        self.events.append(Staged(iteration))

    def persist(self, iteration: int, size_bytes: int, written_bytes: int, write_ns: int) -> None:
        self.durable += 1
        self.durable_iteration = iteration
        self.written_bytes += written_bytes
        self.write_ns += write_ns
        self.last_persist_s = write_ns / 1e9
        self.events.append(Durable(iteration, size_bytes, write_ns))

    def mirror(self, iteration: int, size_bytes: int, send_ns: int) -> None:
        self.mirrored += 1
        self.mirrored_iteration = iteration
        self.mirrored_bytes += size_bytes
        self.mirror_ns += send_ns
        self.events.append(Mirrored(iteration, size_bytes, send_ns))

    def upload(self, iteration: int, size_bytes: int, upload_ns: int) -> None:
        """Of no bytes where the bucket had it before this run."""
        self.uploaded_iteration = iteration
        if size_bytes:
            self.uploaded += 1
            self.uploaded_bytes += size_bytes
            self.upload_ns += upload_ns
            self.events.append(Uploaded(iteration, size_bytes, upload_ns))

    def verify(self, iteration: int, verify_ns: int, pruned: int) -> None:
        self.verified += 1
        self.verified_iteration = iteration
        self.verify_ns += verify_ns
        self.pruned += pruned
        self.last_persist_s += verify_ns / 1e9
        self.events.append(Verified(iteration, verify_ns))

    def fail(self, line: str) -> None:
        self.errors += 1
        self.events.append(Failed(self.staged_iteration or 0, line))

    def status(self) -> Status:
        return Status(**{field.name: getattr(self, field.name) for field in fields(Status)})
