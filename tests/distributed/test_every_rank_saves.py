"""`save()` is every rank's call: it ends when all have their part on disk, and says what keeps one from it."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass, field

import pytest
from test_group import groups, together

from checkflow.checkpointing.saving import save
from checkflow.distributed.group import Group
from checkflow.errors import InputError, PeerError, StoreError


@dataclass
class Rank:
    """In the place of an engine, its executor and its handle."""

    completed: int = 3
    takes_s: float = 0.0
    fails: bool = False
    durable: list[bool] = field(default_factory=list)  # whether it was to be kept, of each

    @property
    def executor(self) -> Rank:
        return self

    @property
    def handle(self) -> Rank:
        return self

    def save(self) -> bool:
        return True

    def persist_now(self, *, keep: bool) -> int:
        self.keep = keep
        return 1

    def drain(self, _deadline_s: float) -> bool:
        time.sleep(self.takes_s)
        if not self.fails:
            self.durable.append(self.keep)
        return not self.fails


def test_it_ends_when_all_have_theirs() -> None:
    ranks = [Rank(), Rank(takes_s=0.3), Rank()]

    def saves(group: Group) -> int:
        save(ranks[group.rank], group, keep=True)  # type: ignore[arg-type]
        return sum(len(each.durable) for each in ranks)

    assert together(groups(3), saves) == [3, 3, 3]
    assert [each.durable for each in ranks] == [[True]] * 3


def test_who_does_not_call_it_is_named_and_nothing_is_said_to_be_durable() -> None:
    ranks, here = [Rank(), Rank()], groups(2, deadline_s=0.2)
    (error,) = together(here[:1], lambda group: save(ranks[0], group, keep=True))  # type: ignore[arg-type]
    assert isinstance(error, PeerError)
    assert str(error).startswith("save(): rank 1 has not come to it within 0.2 s; call it on every rank")
    assert ranks[0].durable == []


@pytest.mark.parametrize(
    ("completed", "keep", "line"),
    [
        (
            (3, 4),
            (True, True),
            r"save: is of iteration 3 \(keep=True\) on rank 0, but of iteration 4 \(keep=True\) on",
        ),
        (
            (3, 3),
            (True, False),
            r"save: is of iteration 3 \(keep=True\) on rank 0, but of iteration 3 \(keep=False\)",
        ),
    ],
)
def test_ranks_that_ask_for_different_checkpoints_are_told(
    completed: tuple[int, int], keep: tuple[bool, bool], line: str
) -> None:
    ranks = [Rank(each) for each in completed]

    def saves(group: Group) -> None:
        save(ranks[group.rank], group, keep=keep[group.rank])  # type: ignore[arg-type]

    for error in together(groups(2), saves):
        assert isinstance(error, InputError) and re.match(line, str(error))
    assert ranks[0].durable == ranks[1].durable == []


def test_what_one_fails_with_the_others_hear_and_they_may_save_again() -> None:
    ranks, here = [Rank(), Rank(fails=True)], groups(2)

    def saves(group: Group) -> None:
        save(ranks[group.rank], group, keep=True)  # type: ignore[arg-type]

    heard, own = together(here, saves)
    assert isinstance(own, StoreError) and isinstance(heard, PeerError)
    assert str(heard) == f"rank 1: {own}"
    assert str(own).startswith("save: iteration 3 is not durable")
    ranks[1].fails = False
    assert together(here, saves) == [None, None]


@pytest.mark.parametrize("on", [(0,), (0, 1)], ids=["one", "all"])
def test_a_restore_that_failed_and_was_caught_does_not_keep_them_from_it(on: tuple[int, ...]) -> None:
    ranks, here = [Rank(), Rank()], groups(2)

    def restores(group: Group) -> None:
        with contextlib.suppress(InputError, PeerError), group.telling():
            if group.rank in on:
                raise InputError("restore: there is no such iteration")
            group.gather("restore()", None)

    def saves(group: Group) -> None:
        restores(group)
        save(ranks[group.rank], group, keep=True)  # type: ignore[arg-type]

    assert together(here, saves) == [None, None]
    assert ranks[0].durable == ranks[1].durable == [True]
