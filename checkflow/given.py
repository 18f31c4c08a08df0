"""What an argument may be: the same check, and the same line, for all that users call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from checkflow.errors import InputError, shown


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument may be, and how a person says that."""

    types: tuple[type, ...]
    words: str
    may_be_none: bool = False

    def check(self, name: str, value: object) -> None:
        """Raises InputError for another type. True is a number to Python alone."""
        if value is None and self.may_be_none:
            return
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            raise InputError(f"{name}: {shown(value)} is of type {type(value).__name__}; give {self.words}")


FLAG = Kind((bool,), "True or False")  # the text "False" would be true
FUNCTION = Kind((Callable,), "a function")  # type: ignore[arg-type]
PATH = Kind((str, os.PathLike), "a path")


def check_kinds(kinds: Mapping[str, Kind], given: Mapping[str, object]) -> None:
    """Raises InputError for the first argument, by name, that is of no type that it can be."""
    for name, kind in kinds.items():
        kind.check(name, given[name])


def check_word(name: str, value: object, known: Iterable[str]) -> None:
    """Raises InputError for what is none of these."""
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise InputError(f"{name}: {shown(value)} is not known; use {', '.join(words)}")


def check_path(name: str, value: object, words: str = "a path") -> str:
    """A path that a user gave, as it was given. Raises InputError for what is none."""
    PATH.check(name, value)
    text: object = os.fspath(value)  # type: ignore[call-overload]
    if not isinstance(text, str):
        raise InputError(f"{name}: {shown(value)} is a path of bytes; give one of text")
    if not text:
        raise InputError(f"{name}: is empty; give {words}")
    if "\0" in text:
        raise InputError(f"{name}: {shown(text)} has a zero byte; give {words}")
    check_no_home(name, text)
    return text


def check_no_home(name: str, text: str) -> None:
    """Raises InputError for ~, which a shell replaces, and nothing else: it would come to a directory of that name."""
    if text == "~" or text.startswith("~/"):
        raise InputError(
            f"{name}: {text}: only a shell knows ~; give the whole path, or ./{text} for what is called so"
        )
