"""The working directory, which may have been removed since."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkflow.errors import InputError
from checkflow.given import check_path

GONE = "the working directory was removed; change to one that is there"


def absolute(path: Path, what: str) -> Path:
    """Of the path that an argument of this name gives. Raises InputError where it is relative to what is not there."""
    if path.is_absolute():
        return path
    try:
        return path.absolute()
    except FileNotFoundError:
        raise InputError(f"{what}: {path}: {GONE}") from None


def absolute_path(name: str, value: object, words: str) -> Path:
    """Of what a user gave. Raises InputError where it is no path, or relative to what is not there."""
    return absolute(Path(check_path(name, value, words)), name)


def check_working_directory() -> None:
    """Raises InputError where it was removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError(GONE) from None


@contextmanager
def kept() -> Iterator[None]:
    """Whatever the code within changes to, it is the same afterwards: relative paths mean what they meant."""
    try:
        before = os.open(".", os.O_PATH | os.O_DIRECTORY)  # no name: it may be moved, or not be readable
    except OSError:  # removed: there is none to come back to
        yield
        return
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)
