"""checkflow demo: what it says of a run that was killed."""

from __future__ import annotations

import pytest

from checkflow.cli.demo import ScriptRun, _compare


def test_an_iteration_that_ended_unheard_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Killed after its checkpoint and before it said so: more was restored than was heard of."""
    whole, killed, resumed = ScriptRun(0, 4, "a", 1.0), ScriptRun(0, 2, "", 1.0), ScriptRun(3, 4, "a", 1.0)
    assert _compare(whole, killed, resumed) == 0
    printed = capfd.readouterr().out
    assert "in iteration 4" in printed and "from iteration 3: 0 completed" in printed
    assert _compare(whole, ScriptRun(0, 3, "", 1.0), ScriptRun(2, 4, "b", 1.0)) == 1
    printed = capfd.readouterr().out
    assert "from iteration 2: 1 completed" in printed and "DIFFERS" in printed
