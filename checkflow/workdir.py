"""The working directory, which may have been removed since."""

from __future__ import annotations

from pathlib import Path

from checkflow.errors import InputError

GONE = "the working directory was removed; change to one that is there"


def absolute(path: Path, what: str) -> Path:
    """Of the path that an argument of this name gives. Raises InputError where it is relative to what is not there."""
    if path.is_absolute():
        return path
    try:
        return path.absolute()
    except FileNotFoundError:
        raise InputError(f"{what}: {path}: {GONE}") from None


def check_working_directory() -> None:
    """Raises InputError where it was removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError(GONE) from None
