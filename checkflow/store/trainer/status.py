"""How far a run's checkpoints are, told apart: staged, durable, verified."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Status:
    """Counters since the store was opened; iterations are None before the first."""

    staged_iteration: int | None
    durable_iteration: int | None
    verified_iteration: int | None
    staged: int
    durable: int
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
