"""benchmarks/public_loops.py: what it says of the loops, and that it finds what a resume lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import benchmarks_path  # noqa: F401
import public_loops
import pytest
from looping import data
from looping.changes import changed_lines
from looping.kills import killed
from looping.loops import LOOPS, Loop

MOST = 5


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_is_attached_in_five_lines(loop: Loop) -> None:
    assert 0 < changed_lines(loop.plain, loop.attached) <= MOST


def test_lines_are_counted(tmp_path: Path) -> None:
    """One that is another counts once; white space counts."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text("a\nb\nc\nd\n")
    after.write_text("a\nB\n c\nd\ne\n")
    assert changed_lines(before, after) == 3


def test_the_smallest_is_killed_and_timed(tmp_path: Path) -> None:
    arguments = ["--loops", "nanogpt", "--iterations", "10", "--kills", "2", "--turns", "2"]
    ran = subprocess.run(
        [
            sys.executable,
            public_loops.__file__,
            *arguments,
            "--directory",
            tmp_path,
            "--json",
            tmp_path / "report.json",
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [row] = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["lines"] == changed_lines(LOOPS[0].plain, LOOPS[0].attached)
    assert row["outcome"]["kills"] == 2 and not row["outcome"]["differs"] and not row["times"]["differs"]
    assert row["times"]["plain_ms"] > 0 and row["times"]["turns"] == 2 and "nanogpt" in ran.stdout


def test_what_a_resume_loses_is_found(tmp_path: Path) -> None:
    """The batch that was fetched ahead is not kept: other data, and so another end."""

    class Forgetful(Loop):
        @property
        def attached(self) -> Path:
            script = tmp_path / "forgetful.py"
            script.write_text(LOOPS[0].attached.read_text().replace('globals(), "X", "Y", ', "globals(), "))
            (tmp_path / "gpt.py").write_text((LOOPS[0].plain.parent / "gpt.py").read_text())
            return script

    loop = Forgetful(LOOPS[0].name, LOOPS[0].arguments, LOOPS[0].kept)
    data.write(tmp_path)
    outcome = killed(loop, tmp_path, tmp_path / "run", 10, 1, seed=1)
    assert {"model", "optimizer"} <= set(outcome.differs) and outcome.differs[-1].startswith("data of iteration")


def test_a_missing_package_is_named() -> None:
    assert Loop("none", lambda _data, _iterations: [], (), ("json", "no_such_package")).missing == ("no_such_package",)
