"""Progress on standard error: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from checkflow.text import plain

out = Console(highlight=False)
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
