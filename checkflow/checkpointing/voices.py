"""Lines that a person is told, by functions that the user gives."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from checkflow.text import plain


def warn(message: str) -> None:
    """As Python tells of what a person should see to."""
    warnings.warn(message, stacklevel=2)


def to_stderr(message: str) -> None:
    """Where there is none, or nobody reads it any more, training goes on."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"checkflow: {message}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Hearers:
    """Who is told, in a line: `notify` what a person should see to, `tell` what is done, or waited for."""

    notify: Callable[[str], None]
    tell: Callable[[str], None]


class Voice:
    """Such a function, told one line of printable characters each time.

    What it raises is raised at once while a training is attached, and costs no iteration later.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waits = False
        self._problem: Exception | None = None

    def __call__(self, line: str) -> None:
        try:
            self._say(plain(line))
        except Exception as error:
            if not self._waits:
                raise
            self._problem = self._problem or error

    def attached(self) -> None:
        """From now on what it raises waits until that can be raised."""
        self._waits = True

    def raise_problem(self) -> None:
        """The first that waits, once."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem


def raise_problems(voices: Iterable[Voice]) -> None:
    """What one of them waits to raise."""
    for voice in voices:
        voice.raise_problem()
