"""`save()` is every rank's call: it ends when all have their part on disk, and says what keeps one from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

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


def groups(size: int, deadline_s: float = 20.0) -> list[Group]:
    store = HashStore()
    return [Group(rank, size, deadline_s, store, store) for rank in range(size)]


def of_each(ranks: list[Group], act: Callable[[Group], Any]) -> list[Any]:
    """What each rank's call gives or raises."""
    found: dict[int, Any] = {}

    def run(group: Group) -> None:
        try:
            found[group.rank] = act(group)
        except Exception as error:  # noqa: BLE001
            found[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[group.rank] for group in ranks]


def test_it_ends_when_all_have_theirs() -> None:
    ranks = [Rank(), Rank(takes_s=0.3), Rank()]

    def saves(group: Group) -> int:
        save(ranks[group.rank], group, keep=True)  # type: ignore[arg-type]
        return sum(len(each.durable) for each in ranks)

    assert of_each(groups(3), saves) == [3, 3, 3]
    assert [each.durable for each in ranks] == [[True]] * 3


def test_who_does_not_call_it_is_named_and_nothing_is_said_to_be_durable() -> None:
    ranks, here = [Rank(), Rank()], groups(2, deadline_s=0.2)
    (error,) = of_each(here[:1], lambda group: save(ranks[0], group, keep=True))  # type: ignore[arg-type]
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

    for error in of_each(groups(2), saves):
        with pytest.raises(InputError, match=line):
            raise error
    assert ranks[0].durable == ranks[1].durable == []


def test_what_one_fails_with_the_others_hear_and_they_may_save_again() -> None:
    ranks, here = [Rank(), Rank(fails=True)], groups(2)

    def saves(group: Group) -> None:
        save(ranks[group.rank], group, keep=True)  # type: ignore[arg-type]

    heard, own = of_each(here, saves)
    assert isinstance(own, StoreError) and isinstance(heard, PeerError)
    assert str(heard) == f"rank 1: {own}"
    assert str(own).startswith("save: iteration 3 is not durable")
    ranks[1].fails = False
    assert of_each(here, saves) == [None, None]
