"""What somebody else's exception says in one line."""

from __future__ import annotations

import pytest

from checkflow.errors import shown
from checkflow.text import MOST_OF_ERROR, brief, plain


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


def test_a_byte_that_is_no_text_is_shown_as_that_byte() -> None:
    """As of a path in another encoding than the process has; other surrogates have no byte."""
    assert plain("a\udcc3\udca9\ud800\x1b") == "a\\xc3\\xa9\\ud800\\x1b"


class _SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_code_of_others_that_fails_at_saying_what_it_is_does_not_matter() -> None:
    assert brief(_SilentError()) == "_SilentError"
    assert shown(_SilentError()) == "a _SilentError"
    assert shown(["a"] * 100) == repr(["a"] * 100)[:100]
