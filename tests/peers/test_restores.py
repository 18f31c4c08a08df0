"""Restores are taken in turn, each in a new process; a tool that cannot is left out from then on, and said so."""

from __future__ import annotations

from pathlib import Path

import benchmarks_path  # noqa: F401 (makes the next ones importable)
import pytest
from forked_workers import forked  # noqa: F401 (a fixture for each test here)
from peering import restores
from peering.drive import Driver, Sizes
from peering.processes import ToolError

SIZES = {"tiny": Sizes(measured={}, baseline=0, warm=0, reported=(), repeats=1)}


def test_what_was_saved_is_restored_in_each_case(tmp_path: Path) -> None:
    said: list[str] = []
    with Driver(("none", "checkflow", "torch_save"), tmp_path, SIZES, said.append) as driver:
        driver.restores("tiny")
        report = driver.report("", "")
    found = {(row.case, row.contender): row for row in report.restores}
    turns = [(case, name) for case in ("cold", "warm", "killed") for name in ("checkflow", "torch_save")]
    assert found.keys() == set(turns)
    assert [line for line in said if "restore" in line] == [f"tiny, restore, {case}: {name}" for case, name in turns]
    for (case, _), row in found.items():
        assert row.exact is (None if case == "killed" else True)
        assert row.iteration >= row.expected - 1 >= restores.SAVES - 1  # one may be in flight at the kill
        assert row.repeats_s == (row.tool_s,) and 0 < row.restore_s < row.tool_s and row.start_s > 0


def test_a_tool_that_fails_is_left_out_of_later_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Candidate:
        state_bytes = 1

        def __init__(self, contender: str, *_: object) -> None:
            self.contender = contender

        def restore(self, case: str, _: restores.Kept) -> None:
            asked.append((case, self.contender))
            if (case, self.contender) == ("warm", "torch_save"):
                raise ToolError("it is lost")

        def figures(self) -> list[object]:
            return []

    monkeypatch.setattr(restores, "Candidate", Candidate)
    with Driver(("torch_save", "dcp"), tmp_path, SIZES, lambda _: None) as driver:
        driver.restores("tiny")
        report = driver.report("", "")
    assert asked == [
        ("cold", "torch_save"),
        ("cold", "dcp"),
        ("warm", "torch_save"),
        ("warm", "dcp"),
        ("killed", "dcp"),
    ]
    assert {tool.name: tool.missing for tool in report.tools} == {
        "torch_save": "tiny, restore, warm: it is lost",
        "dcp": None,
    }


def test_kept_memory_is_in_use_until_it_is_given() -> None:
    def in_use() -> int:
        return next(
            int(row.split()[1])
            for row in Path("/proc/self/status").read_text().splitlines()
            if row.startswith("RssAnon")
        )

    kept, size_kib = restores.Kept(2**26), 2**16
    before = in_use()
    kept.take()
    kept.take()
    assert in_use() - before > 0.9 * size_kib
    kept.give()
    assert in_use() - before < 0.1 * size_kib
