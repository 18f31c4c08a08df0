"""How an error names what was asked for, as its caller wrote it: --lanes 3 on a command line, lanes=3 in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IN_PYTHON: ContextVar[bool] = ContextVar("_IN_PYTHON", default=False)


@contextmanager
def in_python() -> Iterator[None]:
    """Within, who asks has called a function: a context, or a decorator of that function."""
    before = _IN_PYTHON.set(True)
    try:
        yield
    finally:
        _IN_PYTHON.reset(before)


def option(name: str, value: object = None) -> str:
    """An argument of checkflow.compile, and the command's option of that name, with its value where one is given."""
    if _IN_PYTHON.get():
        return name if value is None else f"{name}={value!r}"
    words = name.replace("_", "-")
    if isinstance(value, bool):  # a flag
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words}" if value is None else f"--{words} {value}"


def setting(name: str | None = None) -> str:
    """An argument of the training function; without a name, what gives it any."""
    if _IN_PYTHON.get():
        return "arguments" if name is None else f"arguments[{name!r}]"
    return "--set" if name is None else f"--set {name}"
