"""Hooks of checkflow's own on modules: they are of this process's training, and no part of a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class ModuleHook:
    """Calls a function. In a pickle or a copy of its module it is one that does nothing, and needs no checkflow."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes whatever it is given, and returns None
