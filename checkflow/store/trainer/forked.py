"""Forked children have all that their parent has open, and let go of what would outlive it there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Disownable(Protocol):
    """What is open."""

    def disown(self) -> None:
        """Close it in this process, and leave it to the parent's."""


_open: weakref.WeakSet[Disownable] = weakref.WeakSet()


def disown_in_children(opened: Disownable) -> None:
    """Of every process that is forked until it is closed."""
    _open.add(opened)


def is_closed(opened: Disownable) -> None:
    """It needs that no more."""
    _open.discard(opened)


def _disown_all() -> None:
    for opened in tuple(_open):
        opened.disown()


os.register_at_fork(after_in_child=_disown_all)
