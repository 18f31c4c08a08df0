"""What somebody else's exception says in one line."""

from __future__ import annotations

import pytest

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
