"""Counting what the saver reports."""

from __future__ import annotations

from dataclasses import dataclass

from checkflow.store.trainer.status import Status


@dataclass(slots=True)
class Tally:
    """The one mutable count behind Status."""

    staged_iteration: int | None = None
    durable_iteration: int | None = None
    verified_iteration: int | None = None
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

    def stage(self, iteration: int) -> None:
        self.staged += 1
        self.staged_iteration = iteration

    def persist(self, iteration: int, size_bytes: int, write_ns: int) -> None:
        self.durable += 1
        self.durable_iteration = iteration
        self.written_bytes += size_bytes
        self.write_ns += write_ns
        self.last_persist_s = write_ns / 1e9

    def verify(self, iteration: int, verify_ns: int, pruned: int) -> None:
        self.verified += 1
        self.verified_iteration = iteration
        self.verify_ns += verify_ns
        self.pruned += pruned
        self.last_persist_s += verify_ns / 1e9

    def status(self) -> Status:
        return Status(
            staged_iteration=self.staged_iteration,
            durable_iteration=self.durable_iteration,
            verified_iteration=self.verified_iteration,
            staged=self.staged,
            durable=self.durable,
            verified=self.verified,
            skipped=self.skipped,
            blocked_ns=self.blocked_ns,
            written_bytes=self.written_bytes,
            write_ns=self.write_ns,
            verify_ns=self.verify_ns,
            pruned=self.pruned,
            restarts=self.restarts,
            errors=self.errors,
        )
