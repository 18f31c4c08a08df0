"""What a plan or a schedule claims, row by row, as this package reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkflow.verify.terms import Terms


class Part(NamedTuple):
    """Bytes of a state tensor."""

    state: int  # index into Terms.state
    offset_bytes: int
    size_bytes: int


class PlannedTransfer(NamedTuple):
    """A part's planned way to the host. docs/model.md says what `snapshot` means in each formulation."""

    part: Part
    snapshot: int | None  # None: direct
    start: int
    finish: int


@dataclass(frozen=True, slots=True)
class Claims:
    """What a plan says of itself, in the words of schedules/FORMAT.md."""

    formulation: str
    transfers: str
    peak_bytes: int
    lower_bound_bytes: int
    proven_by: str
    constructive_peak_bytes: int | None


def named(terms: Terms, table: str, number: int, part: Part) -> str:
    """A row of the plan or the actions, for a message: "plan row 3 (model/fc.weight, bytes 0..512)"."""
    end = part.offset_bytes + part.size_bytes
    return f"{table} row {number} ({terms.state[part.state].name}, bytes {part.offset_bytes}..{end})"
