"""What the one reader of JSON takes, and what it refuses, in a line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow import strictjson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
REFUSED = {
    "a key twice": (b'{"a": 1, "b": {"c": 1, "c": 1}}', "a key stands twice in one object"),
    "NaN": (b'{"a": NaN}', "NaN is not JSON"),
    "infinity": (b"[-Infinity]", "-Infinity is not JSON"),
    "1e999": (b'{"a": -1e999}', "-1e999 is larger than any number here"),
    "cut short": (b'{"a": ', "Expecting value"),
    "more than one": (b"{} {}", "Extra data"),
    "nothing": (b"", "Expecting value"),
    "no UTF-8": (b"\xff{}", "utf-8"),
    "UTF-16": ("{}".encode("utf-16"), "utf-8"),
    "a BOM": (b"\xef\xbb\xbf{}", "BOM"),
    "nested too deeply": (b"[" * 100_000, "recursion"),
    "a number without end": (b"9" * 100_000, "digits"),
}


@given(VALUES)
def test_what_is_written_is_read(value: object) -> None:
    text = json.dumps(value)
    assert strictjson.loads(text) == strictjson.loads(text.encode()) == value


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_strict_json_is_refused(case: str) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(ValueError, match=expected) as raised:
        strictjson.loads(text)
    assert len(str(raised.value)) <= 80 and "\n" not in str(raised.value)
