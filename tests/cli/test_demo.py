"""checkflow demo: what it says of a run that was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from checkflow.cli import demo
from checkflow.cli.demo import ScriptRun, _compare
from checkflow.store.both import lock

HOLDS = """
import os, sys
from checkflow.store.both.bytelocks import take_of_directory

store = sys.argv[1]
assert take_of_directory(os.open(store, os.O_RDONLY), int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
open(store + "/written", "w").close()
"""


class Ended(BaseException):
    """What SIGTERM raises, in a test."""


def test_an_iteration_that_ended_unheard_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Killed after its checkpoint and before it said so: more was restored than was heard of."""
    whole, killed, resumed = ScriptRun(0, 4, "a", 1.0), ScriptRun(0, 2, "", 1.0), ScriptRun(3, 4, "a", 1.0)
    assert _compare(whole, killed, resumed) == 0
    printed = capfd.readouterr().out
    assert "in iteration 4" in printed and "from iteration 3: 0 completed" in printed
    assert _compare(whole, ScriptRun(0, 3, "", 1.0), ScriptRun(2, 4, "b", 1.0)) == 1
    printed = capfd.readouterr().out
    assert "from iteration 2: 1 completed" in printed and "DIFFERS" in printed


@pytest.mark.parametrize(("held", "awaited"), [(lock.SAVER, True), (lock.TRAINER, False)], ids=["saver", "trainer"])
def test_what_ends_the_demo_is_told_whoever_still_writes(
    *, held: int, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes once the killed training's saver has written; a trainer that will not end is not waited for."""
    waits = []

    def pause() -> None:
        """The demo waits: the saver may go on to its end."""
        waits.append(not (store / "written").exists())
        writer.communicate()

    monkeypatch.setattr(lock, "_pause", pause)
    with pytest.raises(Ended), demo._folder() as folder:
        store = folder / demo.STORE
        store.mkdir()
        command = [sys.executable, "-c", HOLDS, str(store), str(held)]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "held\n"
        raise Ended
    writer.communicate()
    assert waits == [True] * awaited
    assert (writer.returncode == 0) == awaited
    assert not folder.exists()
