"""What somebody else's exception says in one line."""

from __future__ import annotations

import pytest

from checkflow.errors import shown
from checkflow.text import MOST_OF_ERROR, brief


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "ValueError"),
        ("two\n  lines", "ValueError: two lines"),
        ("words " * 100, "ValueError: " + "words " * 50 + "..."),
        ("x" * 400, "ValueError: " + "x" * MOST_OF_ERROR + " ..."),  # a path, say: as much of it as there is room for
    ],
)
def test_an_exception_is_one_line_that_ends_with_a_word(said: str, told: str) -> None:
    assert brief(ValueError(said)) == told


class _SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_code_of_others_that_fails_at_saying_what_it_is_does_not_matter() -> None:
    assert brief(_SilentError()) == "_SilentError"
    assert shown(_SilentError()) == "a _SilentError"
    assert shown(["a"] * 100) == repr(["a"] * 100)[:100]
