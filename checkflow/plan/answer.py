"""What a Problem is answered with: a Plan, or Infeasible. Steps and positions are unrolled, as a Problem says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Formulation(StrEnum):
    PAPER = "paper"  # Eqs 1-12 with all of C, P, S, alpha
    COMPACT = "compact"  # the same optimum from counts of equal chunks
    DIRECT = "direct"  # beyond the paper: live tensors may be offloaded, windows are cyclic


class Transfers(StrEnum):
    PACKED = "packed"  # Eq 9: a transfer happens within one step
    STREAMING = "streaming"  # a FIFO link: a transfer may run across steps


class ProvenBy(StrEnum):
    BOUND = "bound"  # the plan meets a lower bound found by arithmetic
    MILP = "milp"  # a solver's dual bound
    EXHAUSTIVE = "exhaustive"  # every plan was tried


class Reason(StrEnum):
    """Why no plan exists, in the order in which they are tried."""

    DEADLINE = "deadline"  # a tensor is overwritten before any snapshot of it is allowed
    BANDWIDTH = "bandwidth"  # the bytes do not fit the link, however they are split
    CHUNK = "chunk"  # they would fit, but not in pieces of this size
    MEMORY = "memory"  # every plan needs more than the limit


@dataclass(frozen=True, slots=True)
class Chunk:
    """Planning unit of a tensor: size_bytes of it from offset_bytes on."""

    state: int  # index into Problem.state
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk's way to the host. docs/model.md says what `snapshot` means in each formulation."""

    chunk: Chunk
    snapshot: int | None  # None: direct, the live tensor is read
    start: int  # step during which its first byte moves
    finish: int  # step during which its last byte moves


@dataclass(frozen=True, slots=True)
class SolverRun:
    """Which solver answered, and why that one."""

    name: str  # "highs", "gurobi", "cbc", "exhaustive" or "none"
    why: str
    wall_s: float = 0.0
    variables: int = 0
    constraints: int = 0


@dataclass(frozen=True)
class Plan:
    """Transfers in link order, with the certificate: peak, bound and what proved the bound."""

    formulation: Formulation
    transfers_kind: Transfers
    transfers: tuple[Transfer, ...]
    peak_bytes: int
    lower_bound_bytes: int
    proven_by: ProvenBy
    solver: SolverRun
    constructive_peak_bytes: int | None = None  # of the plan found without a solver, where there was one

    @property
    def gap(self) -> float:
        """(peak - bound) / bound, a fraction; 0.0 is proven optimal."""
        return (self.peak_bytes - self.lower_bound_bytes) / self.lower_bound_bytes if self.peak_bytes else 0.0

    @property
    def snapshot_bytes(self) -> int:
        return sum(t.chunk.size_bytes for t in self.transfers if t.snapshot is not None)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan exists; what would make one. With either figure, and nothing else changed, a plan was constructed."""

    reason: Reason
    detail: str  # one line for a person, names the tensor or the figures
    needed_bandwidth_bytes_per_s: int | None  # at this interval, the least for which one came out; None: none did
    smallest_interval: int | None  # at this bandwidth, the same
    snapshot_bytes_at_that_interval: int | None  # of that plan
