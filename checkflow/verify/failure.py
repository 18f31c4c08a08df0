"""How a broken rule is told: one line that names the row, the rule and the numbers."""

from __future__ import annotations

from typing import NoReturn

from checkflow.errors import VerificationError


def fail(message: str) -> NoReturn:
    """Raise the VerificationError."""
    raise VerificationError(message)
