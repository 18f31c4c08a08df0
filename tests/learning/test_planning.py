"""What the planner's process answers."""

from __future__ import annotations

import pytest
from handmade import GRAPH

from checkflow.learning import planning
from checkflow.learning.messages import Request, Unplanned


def test_a_bug_is_answered_with_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without a plan; that a process has ended would say nothing."""

    def fails(*_: object) -> None:
        raise TypeError("not foreseen")

    monkeypatch.setattr(planning, "compile_graph", fails)
    answer = planning.answer_to(Request(GRAPH, 10**9, "checkflow", None, factors=False, keep_as=None))
    assert answer == Unplanned("internal error, please report it (TypeError: not foreseen)")
