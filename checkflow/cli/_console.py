"""Output whose lines are as long as they are, but on a terminal; progress on standard error, in a status line there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from checkflow.text import plain

_UNBOUNDED = 10_000  # columns: a table that is folded in a pipe or a file cannot be searched


def _width() -> int | None:
    """The terminal's, or as COLUMNS says; None leaves it to rich."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNBOUNDED


out = Console(highlight=False, width=_width())
err = Console(stderr=True, highlight=False)


def say(line: str) -> None:
    """A line on standard output. What it quotes may come from anybody."""
    out.print(plain(line), soft_wrap=True, markup=False)


def tell(line: str) -> None:
    """As `say`, on standard error."""
    err.print(plain(line), soft_wrap=True, markup=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that tells what goes on now, in a few words."""
    if not err.is_terminal:
        last = ""

        def say(text: str) -> None:
            nonlocal last
            if text != last:
                tell(f"checkflow: {text}")
                last = text

        yield say
        return
    with err.status("starting") as status:
        yield lambda text: status.update(Text(plain(text)))
