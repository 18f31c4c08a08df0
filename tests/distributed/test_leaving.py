"""Ranks that end at different times, or after different iterations: who has closed is not waited for."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from test_group import groups, together

from checkflow.checkpointing.together import Together
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.group import Group
from checkflow.distributed.pulse import Pulse


def test_a_rank_that_has_closed_is_not_called_silent() -> None:
    ranks = groups(3, deadline_s=0.5)
    told: list[str] = []
    first, *others = (Pulse(group, told.append) for group in ranks)
    for other in others:
        other.beat()
    Agreement(ranks[1]).close(orderly=True)
    deadline = time.monotonic() + 60.0
    while not told and time.monotonic() < deadline:
        first.beat()
        time.sleep(0.005)
    assert "and rank 2 says nothing any more" in told[0]


@pytest.mark.parametrize("left", ["left by SystemExit", None])
def test_how_a_rank_left_is_told_where_others_wait_for_it(tmp_path: Path, left: str | None) -> None:
    """Not that it says nothing, nor to see whether its machine runs."""
    ranks = groups(2, deadline_s=0.5)
    told: list[str] = []
    first, other = Pulse(ranks[0], told.append), Pulse(ranks[1], told.append)
    other.beat()
    hearers = Hearers(told.append, told.append)
    Together(ranks[1], tmp_path, told.append, hearers).close(None if left is None else 12, left)
    deadline = time.monotonic() + 60.0
    while not told and time.monotonic() < deadline:
        first.beat()
        time.sleep(0.005)
    what = "left after iteration 12 (left by SystemExit): see what it says" if left else "says nothing any more"
    assert len(told) == 1 and f"rank 1 {'has ' if left else ''}{what}" in told[0]
    assert told[0].endswith("; torch.distributed's timeout will end the others")


def test_one_that_has_left_before_is_not_waited_for() -> None:
    first, other = groups(2)
    assert dataclasses.replace(other, deadline_s=0.1).leave(5) == []
    began = time.monotonic()
    assert first.leave(7) == [7, 5]
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(("completed", "lines"), [((8, 8, 7), 1), ((8, 8, 8), 0)])
def test_a_step_that_some_rank_left_out_is_told_at_the_end(
    tmp_path: Path, completed: tuple[int, ...], lines: int
) -> None:
    told: list[str] = []

    def end(group: Group) -> None:
        Together(group, tmp_path, told.append, Hearers(told.append, told.append)).close(completed[group.rank])

    assert together(groups(3), end) == [None] * 3
    assert len(told) == lines
    assert all("rank 0 has ended after 8 iterations, and rank 2 after 7: where a step()" in line for line in told)
