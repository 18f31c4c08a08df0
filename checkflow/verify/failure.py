"""How a broken rule is told: one line that names the row, the rule and the numbers."""

from __future__ import annotations

from typing import NoReturn

from checkflow.errors import VerificationError
from checkflow.plan import Chunk, Problem


def fail(message: str) -> NoReturn:
    """Raise the VerificationError."""
    raise VerificationError(message)


def row(problem: Problem, table: str, number: int, chunk: Chunk) -> str:
    """A row of the plan or the actions, for a message: "plan row 3 (model/fc.weight, bytes 0..512)"."""
    end = chunk.offset_bytes + chunk.size_bytes
    return f"{table} row {number} ({problem.state[chunk.state].name}, bytes {chunk.offset_bytes}..{end})"
