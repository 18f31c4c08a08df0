"""JSON files: readable, whole or not there at all, and read without mercy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
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


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    """Whole or not at all, through two links; and a link to nothing makes its file."""
    (tmp_path / "there").mkdir()
    path, link, second = tmp_path / "there" / "a.json", tmp_path / "link", tmp_path / "second"
    link.symlink_to(Path("there", "a.json"))
    second.symlink_to(link)
    for text in ("new", "newer"):
        jsonfile.check_output(second)
        jsonfile.write_text(second, text)
        assert path.read_text() == text and not path.is_symlink()
    assert link.is_symlink() and second.is_symlink()
    assert [found.name for found in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127], ids=["255 letters", "254 bytes"])
def test_a_name_may_be_as_long_as_the_file_system_has_them(name: str, tmp_path: Path) -> None:
    """Whatever the file that is not whole yet is called."""
    path = tmp_path / name
    jsonfile.check_output(path)
    jsonfile.write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "why"), [("n" * 256, "File name too long"), ("loop", "Too many levels of symbolic")])
def test_a_name_that_can_have_no_file_is_told_at_first(name: str, why: str, tmp_path: Path) -> None:
    """And a link that leads to itself stays what it is."""
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(InputError, match=rf": cannot be written \({why}.*\); choose another output$"):
        jsonfile.check_output(tmp_path / name)
    assert list(tmp_path.iterdir()) == [loop] and loop.is_symlink()


def test_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    """It is still a pipe afterwards."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    jsonfile.check_output(path)
    jsonfile.write_text(path, "new")
    assert os.read(reader, 100) == b"new" and path.is_fifo()
    os.close(reader)


def test_a_device_stays_one() -> None:
    """A terminal of our own, not the machine's /dev/null: root could replace that."""
    ours, theirs = os.openpty()
    terminal = Path(os.ttyname(theirs))
    jsonfile.check_output(terminal)
    jsonfile.write_text(terminal, "new")
    assert os.read(ours, 100) == b"new" and terminal.is_char_device()
    os.close(ours)
    os.close(theirs)


def test_what_standard_output_is_is_written_on(tmp_path: Path) -> None:
    """Redirected to a file that has something, the file keeps it: -o /dev/stdout >> log, by a link of our own."""
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "from pathlib import Path; from checkflow import jsonfile; "
    code += "jsonfile.write_text(Path('stdout'), 'written\\n'); print('after')"
    with log.open("a") as stream:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=stream, cwd=tmp_path)
    assert log.read_text() == "before\nwritten\nafter\n"


def test_a_socket_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, before anything is written."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s.json")
        with pytest.raises(InputError, match=r"^s\.json: is no regular file; choose another output$"):
            jsonfile.check_output(Path("s.json"))


def test_outputs_are_apart_from_each_other_and_from_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name: as it is written, through a link, or as another name of the same file."""
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    Path("link").symlink_to("a")
    Path("hard").hardlink_to("a")
    Path("folder").symlink_to(".")
    for name in ("a", "./a", str(tmp_path / "a"), "link", "hard", "folder/a"):
        with pytest.raises(InputError, match="is read, and would be overwritten; choose another output"):
            jsonfile.check_outputs([Path("other"), Path("a")], Path("b"), Path(name))
        with pytest.raises(InputError, match="two outputs would be written there; give each a file of its own"):
            jsonfile.check_outputs([], Path("a"), Path("b"), Path(name))
    with pytest.raises(InputError, match=r"^folder/b: two outputs"):
        jsonfile.check_outputs([], Path("b"), appended=[Path("folder/b")])
    jsonfile.check_outputs([Path("a")], Path("b"), Path("c"), Path("/dev/null"), Path("/dev/null"))


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


def test_a_device_is_no_file() -> None:
    """It would be read for ever."""
    with pytest.raises(InputError, match=r"^/dev/zero: is a device; give a file$"):
        jsonfile.read_text(Path("/dev/zero"))
