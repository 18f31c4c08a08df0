"""JSON files: readable, whole or not there at all, and read without mercy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from checkflow import jsonfile
from checkflow.errors import FormatError, InputError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_rows_stand_one_to_a_line() -> None:
    """A list of objects or lists is spread over lines; other values are not."""
    text = jsonfile.render({"a": 1, "rows": [{"x": 1}, {"x": 2}], "pairs": [[1, 2]], "numbers": [1, 2], "none": []})
    assert text == (
        '{\n "a": 1,\n "rows": [\n  {"x": 1},\n  {"x": 2}\n ],\n "pairs": [\n  [1, 2]\n ],\n "numbers": [1, 2],\n'
        ' "none": []\n}\n'
    )


@given(st.dictionaries(st.text(alphabet="abc", min_size=1), VALUES))
def test_rendered_document_is_json_that_says_the_same(document: dict[str, object]) -> None:
    """Whatever is rendered can be read by any JSON reader, and has the same digest."""
    again = json.loads(jsonfile.render(document))
    assert again == document
    assert jsonfile.digest_of(again) == jsonfile.digest_of(document)


def test_digest_ignores_order_and_tells_values_apart() -> None:
    """Key order does not matter; order in a list, and the type of a value, do."""
    assert jsonfile.digest_of({"a": 1, "b": 2}) == jsonfile.digest_of({"b": 2, "a": 1})
    assert len({jsonfile.digest_of(value) for value in ([1, 2], [2, 1], ["1", 2], [True, 2], [None, 2])}) == 5
    assert jsonfile.digest_of({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    """What was there before is gone, nothing else is left in the folder, and others may read it."""
    path = tmp_path / "a.json"
    path.write_text("old and longer than the new")
    jsonfile.write_text(path, "new")
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


class Interrupted(BaseException):
    """What Ctrl-C raises, in a test."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Interrupted()], ids=["full", "Ctrl-C"])
def test_failure_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk or Ctrl-C before the data are on disk leaves what was there, and no temporary file."""
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises((InputError, Interrupted)) as raised:
        jsonfile.write_text(path, "new")
    if isinstance(raised.value, InputError):
        assert str(raised.value) == f"{path}: cannot be written (No space left on device); choose another output"
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_folder_in_the_way_is_one_line(tmp_path: Path) -> None:
    """A file cannot replace a folder; the folder stays and no temporary file does."""
    path = tmp_path / "a.json"
    path.mkdir()
    with pytest.raises(InputError, match=r"a\.json: cannot be written"):
        jsonfile.write_text(path, "new")
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """A binary file is named as one."""
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"a\.json: is not UTF-8 text"):
        jsonfile.read_text(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"format": "f", "version": 1',
        '{"format": "f", "version": 1} x',
        '{"format": "f", "version": 1, "a": NaN}',
        '{"format": "f", "version": 1, "a": -Infinity}',
        '{"format": "f", "format": "f", "version": 1}',
        '{"format": "f", "version": 1, "a": {"b": 1, "b": 1}}',
        "[" * 100_000,
        '{"format": "f", "version": 1, "a": ' + "9" * 5000 + "}",
        "[]",
        "null",
        '"f"',
        '{"version": 1}',
        '{"format": "g", "version": 1}',
        '{"format": ["f"], "version": 1}',
        '{"format": "f"}',
        '{"format": "f", "version": null}',
        '{"format": "f", "version": true}',
        '{"format": "f", "version": "1"}',
        '{"format": "f", "version": 2}',
        '{"format": "f", "version": {"a\\n": "\\n"}}',
    ],
)
def test_what_is_not_a_document_of_this_format_is_refused(tmp_path: Path, text: str) -> None:
    """One line that begins with the file, whatever is in it."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FormatError) as raised:
        jsonfile.parse_json(path, "f", 1)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_document_of_this_format_is_returned(tmp_path: Path) -> None:
    """The object itself, with its format and version."""
    path = tmp_path / "a.json"
    path.write_text('{"format": "f", "version": 1, "é": "é"}', encoding="utf-8")
    assert jsonfile.parse_json(path, "f", 1) == {"format": "f", "version": 1, "é": "é"}


def test_validation_is_strict_and_names_the_field() -> None:
    """No conversion, and the way to the first wrong field."""
    adapter = TypeAdapter(dict[str, list[int]])
    assert jsonfile.validate(adapter, {"a": [1]}, "x") == {"a": [1]}
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(FormatError, match=r"^file: field a\.1: input should be a valid integer; correct it$"):
            jsonfile.validate(adapter, {"a": [1, wrong]}, "file")
    with pytest.raises(FormatError, match=r"^file: field a b\.0: "):
        jsonfile.validate(adapter, {"a\nb": [None]}, "file")
    with pytest.raises(FormatError, match=r"^file: field the document: input should be an object"):
        jsonfile.validate(adapter, [], "file")
