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
_QUIET_ON_TERMINAL_S = 10.0


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that tells what goes on now, in a few words. What goes on for long is told again, with its time."""
    if not err.is_terminal:
        with _reminding(lambda text: tell(f"checkflow: {text}"), _QUIET_S) as say:
            yield say
        return
    with (
        err.status("starting") as status,
        _reminding(lambda text: status.update(Text(plain(text))), _QUIET_ON_TERMINAL_S) as say,
    ):
        yield say


@contextmanager
def _reminding(show: Callable[[str], None], every_s: float) -> Iterator[Callable[[str], None]]:
    last, told_s = "", time.monotonic()
    since_s = told_s
    ended = threading.Event()

    def say(text: str) -> None:
        nonlocal last, since_s, told_s
        if text != last:
            show(text)
            last = text
            since_s = told_s = time.monotonic()

    def remind() -> None:
        nonlocal told_s
        while not ended.wait(min(every_s, 1.0)):
            now_s = time.monotonic()
            if last and now_s - told_s >= every_s:
                told_s = now_s
                show(f"{last}, for {now_s - since_s:.0f} s")

    thread = threading.Thread(target=remind, name="checkflow-progress", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
