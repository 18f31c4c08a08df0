"""Progress on standard error: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that tells what goes on now, in a few words."""
    if not err.is_terminal:
        last = ""

        def say(text: str) -> None:
            nonlocal last
            if text != last:
                err.print(f"checkflow: {text}", soft_wrap=True, markup=False)
                last = text

        yield say
        return
    with err.status("starting") as status:
        yield lambda text: status.update(text)
