"""Output whose lines are as long as they are, but on a terminal; progress on standard error, in a status line there."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from checkflow.text import plain

_UNBOUNDED = 10_000  # columns: a table that is folded in a pipe or a file cannot be searched


def _width() -> int | None:
    """The terminal's, or as COLUMNS says; None leaves it to rich."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNBOUNDED


class _Err(Console):
    """Whoever read it has left: the work goes on all the same."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


# What is shown may come from anybody: a path with brackets or colons is neither markup nor an emoji.
out = Console(highlight=False, markup=False, emoji=False, width=_width())
err = _Err(stderr=True, highlight=False, markup=False, emoji=False)


def say(line: str = "", style: str | None = None, indent: str = "") -> None:
    """A line on standard output. What it quotes may come from anybody."""
    out.print(indent + plain(line), soft_wrap=True, style=style)


def tell(line: str) -> None:
    """As `say`, on standard error."""
    err.print(plain(line), soft_wrap=True)


_QUIET_S = 30.0  # without a word, until it is said that the same goes on


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that tells what goes on now, in a few words. What goes on for long is told again, with its time."""
    last, since = "starting", time.monotonic()
    ended = threading.Event()

    def remind(show: Callable[[str], None], every_s: float) -> None:
        told = 0.0
        while not ended.wait(min(every_s, 1.0)):
            elapsed = time.monotonic() - since
            told = 0.0 if elapsed < every_s else told
            if elapsed - told >= every_s:
                told = elapsed
                show(f"{last}, for {elapsed:.0f} s")

    @contextmanager
    def reminding(show: Callable[[str], None], every_s: float) -> Iterator[None]:
        thread = threading.Thread(target=remind, args=(show, every_s), name="checkflow-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    if not err.is_terminal:

        def say(text: str) -> None:
            nonlocal last, since
            if text != last:
                tell(f"checkflow: {text}")
                last, since = text, time.monotonic()

        with reminding(lambda text: tell(f"checkflow: {text}"), _QUIET_S):
            yield say
        return
    with err.status("starting") as status:

        def update(text: str) -> None:
            nonlocal last, since
            status.update(Text(plain(text)))
            last, since = text, time.monotonic()

        with reminding(lambda text: status.update(Text(plain(text))), 10.0):
            yield update
