"""The journal: what it gives back is what would be computed now, or nothing."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from modelfiles import LINEAR

from checkflow.errors import InputError
from checkflow.hardware import load_profile, write_profile
from checkflow.sweep import journal as module
from checkflow.sweep.cells import Cell, Edge, Outcome, Question, Row
from checkflow.sweep.check import check
from checkflow.sweep.evaluate import failure
from checkflow.sweep.jobs import Answered, Ask, Trace, replies
from checkflow.sweep.journal import Journal, read_journal
from checkflow.sweep.traces import TracedModel

BANDWIDTH = 10**9
PROFILE = load_profile("rtx3090").model_copy(update={"name": "mine"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile(Path("mine.yaml"), PROFILE)
    Path("helper.py").write_text("FACTOR = 1\n")
    Path("net.py").write_text("from helper import FACTOR\n" + LINEAR)


def computed(questions: Sequence[Cell]) -> list[Answered]:
    """Rows of cells of one model, as a worker gives them."""
    (traced,) = replies(Trace(questions[0].model, questions[0].settings))
    assert isinstance(traced, TracedModel)
    profiles = check(questions)
    given = replies(Ask(tuple(questions), tuple(profiles[question] for question in questions), traced))
    return [reply for reply in given if isinstance(reply, Answered)]


def kept(path: Path, cells: Sequence[Cell]) -> dict[Question, Row | Edge]:
    """Compute cells and keep them in a journal."""
    profiles = check(cells)
    found = computed(cells)
    with Journal(path) as journal:
        for each in found:
            assert isinstance(each.answer, Row) and each.answer.feasible
            journal.keep(each.answer, profiles[each.answer.cell], each.files)
    return {each.answer.cell: each.answer for each in found if isinstance(each.answer, Row)}


MINE = Cell(model="net.py", device="mine.yaml", bandwidth_bytes_per_s=BANDWIDTH, interval=None)
BUNDLED = Cell(model="alexnet", settings=(("small", "true"),), device="mine.yaml", bandwidth_bytes_per_s=BANDWIDTH)
PATH = Path("j.jsonl")


def reread(*cells: Cell) -> dict[Question, Row | Edge]:
    return read_journal(PATH, cells, check(cells))


def test_what_was_kept_is_given_back_to_the_last_digit() -> None:
    """Rows of user's and bundled models come back equal, and only those that are asked for."""
    found = kept(PATH, [MINE]) | kept(PATH, [BUNDLED])
    assert reread(MINE, BUNDLED) == found
    assert reread(MINE) == {MINE: found[MINE]}
    assert reread(MINE.model_copy(update={"bandwidth_bytes_per_s": BANDWIDTH + 1})) == {}


def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkflow_version", lambda: "0.0.0")


def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_version", lambda: "1.0.0")


def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other").mkdir()
    for name in ("net.py", "mine.yaml", "helper.py"):
        Path("other", name).write_text(Path(name).read_text())
    Path("j.jsonl").rename("other/j.jsonl")
    monkeypatch.chdir("other")


def _appended(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(_: pytest.MonkeyPatch) -> None:
        with Path(name).open("a") as stream:
            stream.write("\n# changed\n")

    return change


def _profile(_: pytest.MonkeyPatch) -> None:
    write_profile(Path("mine.yaml"), PROFILE.model_copy(update={"launch_latency_ns": 4999}))


CHANGES = {
    "the model": _appended("net.py"),
    "what the model imports": _appended("helper.py"),
    "the profile": _profile,
    "checkflow": _version,
    "torch": _torch,
    "the folder": _elsewhere,
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_stale_is_given_back(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is dropped when anything that made it has changed."""
    kept(PATH, [MINE])
    assert reread(MINE)
    CHANGES[what](monkeypatch)
    assert reread(MINE) == {}


def test_a_comment_in_the_profile_changes_nothing() -> None:
    """The profile's figures count, not its text."""
    kept(PATH, [MINE])
    _appended("mine.yaml")(pytest.MonkeyPatch())
    assert reread(MINE)


def test_a_journal_cut_anywhere_gives_what_is_whole() -> None:
    """Cut at every length, each whole line is given back, and what is appended then is too."""
    other = MINE.model_copy(update={"slack_ppm": 1000})
    found = kept(PATH, [MINE, other])
    whole = PATH.read_bytes()
    first = whole.index(b"\n")
    assert whole.count(b"\n") == 2
    for length in range(0, len(whole), 7):
        PATH.write_bytes(whole[:length])
        expected = {MINE: length >= first, other: length >= len(whole) - 1}  # the newline itself tells nothing
        assert reread(MINE, other) == {cell: found[cell] for cell, is_whole in expected.items() if is_whole}
    PATH.write_bytes(whole[: first + 50])
    again = kept(PATH, [other])
    assert reread(MINE, other) == {MINE: found[MINE]} | again


def test_lines_of_something_else_are_as_if_not_there() -> None:
    """A journal with other text, bytes, or fields gives what it can."""
    found = kept(PATH, [MINE])
    line = PATH.read_text()
    earlier = line.replace('"packed_peak_bytes"', '"executed_peak_bytes"')
    assert earlier != line
    stairs = line.replace('"steps"', '"stairs"')
    for wrong in ("hello\n", "\xff\n", "{}\n", "[]\n", stairs, earlier, "1" * 10_000 + "\n"):
        PATH.write_text(wrong + line)
        assert reread(MINE) == found


def test_failures_are_not_kept() -> None:
    """What failed is tried again."""
    with Journal(PATH) as journal:
        journal.keep(failure(MINE, "out of memory"), check([MINE])[MINE], ())
    assert PATH.read_bytes() == b""
    assert failure(MINE, "").outcome is Outcome.FAILED


def test_a_disk_that_fills_is_one_line() -> None:
    """It is the answer that could not be kept that is told, and the command that closes the journal adds nothing."""
    found = computed([MINE])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        told = pytest.raises(
            InputError, match=r"^j\.jsonl: .*\(File too large\); allow larger files \(ulimit -f\), and go on$"
        )
        with told, Journal(PATH) as journal:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            journal.keep(found[0].answer, check([MINE])[MINE], found[0].files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept(PATH, [MINE])
    assert list(reread(MINE)) == [MINE]


def test_a_journal_that_cannot_be_used_is_named() -> None:
    """A folder, or a folder that is missing, in one line."""
    for path in (Path(), Path("missing/j.jsonl")):
        with pytest.raises(InputError, match="--journal"):
            read_journal(path, [MINE], check([MINE]))
            with Journal(path):
                pass


def test_a_file_of_something_else_is_not_appended_to() -> None:
    """Notes, or another JSON, stay as they are; a torn first line is a journal's, and so is an earlier checkflow's."""
    for text in ("notes\n", "\nnotes", '{"rows": []}\n', "{}\n"):
        PATH.write_text(text)
        with pytest.raises(InputError, match=r"^j\.jsonl: is no journal of a sweep, .* --journal$"), Journal(PATH):
            pass
        assert PATH.read_text() == text
    for text in ("", '{"che', '{"checkflow":"0.0", "of": "an earlier one"}\n'):
        PATH.write_text(text)
        with Journal(PATH):
            pass
        assert PATH.read_text().startswith(text)
