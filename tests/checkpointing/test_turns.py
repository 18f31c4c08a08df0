"""Ranks upload the same checkpoints, one at a time, whenever each of them verifies, uploads, hears and looks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from checkflow.checkpointing.turns import Turns
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.marks import Mark
from checkflow.store.both.messages import PassedReport, UploadedReport
from checkflow.store.trainer.bucket_process import BucketProcess


@dataclass
class Meeting:
    """Where ranks count themselves, or give up; what each is still to hear, in any order."""

    size: int
    called: dict[str, list[tuple[int, Callable[[object], None]]]] = field(default_factory=dict)
    ruled: dict[str, object] = field(default_factory=dict)
    to_hear: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def count(self, rank: int, name: str, rules: Callable[[], object], agreed: Callable[[object], None]) -> None:
        self.called.setdefault(name, []).append((rank, agreed))
        if name in self.ruled:
            self.to_hear.append((rank, partial(agreed, self.ruled[name])))
        elif len(self.called[name]) == self.size:
            self.rule(name, rules())

    def rule(self, name: str, ruling: object) -> None:
        if name not in self.ruled:
            self.ruled[name] = ruling
            self.to_hear += [(rank, partial(agreed, ruling)) for rank, agreed in self.called.get(name, ())]

    def hear(self, number: int) -> None:
        self.to_hear.pop(number)[1]()


class Rank:
    """One rank's Turns, between what stands for its agreement and for its uploader. Its serials are its own."""

    def __init__(self, number: int, meeting: Meeting) -> None:
        self.number = number
        self.meeting = meeting
        self.attempt = 1
        self.on_whole: Callable[[Mark, int], None] = lambda _mark, _serial: None
        self.verified = 0
        self.asked: int | None = None
        self.begun: list[int] = []  # iterations that it was asked to upload
        self.there: set[int] = set()
        self.pruned_below: list[int] = []
        self.dropped: set[int] = set()
        self.is_over = False
        self.told: list[object] = []
        self.done: deque[UploadedReport | PassedReport] = deque()
        self.turns = Turns(cast("Agreement", self), cast("BucketProcess", self), self.told.append)

    def serial(self, iteration: int) -> int:
        return iteration * 10 + self.number

    # as its agreement
    def choosing(self, turn: int, wanted: Mark, chosen: Callable[[Mark | None], None]) -> None:
        self.meeting.count(
            self.number, f"turn {turn}", lambda: wanted, lambda ruling: chosen(cast("Mark | None", ruling))
        )

    def choosing_no_more(self, turn: int) -> None:
        self.meeting.rule(f"turn {turn}", None)

    def uploaded(self, mark: Mark, ruled: Callable[[bool], None]) -> None:
        self.meeting.count(self.number, f"uploaded {mark}", lambda: True, lambda ruling: ruled(ruling is not None))

    def not_uploaded(self, mark: Mark) -> None:
        self.meeting.rule(f"uploaded {mark}", None)

    # as its uploader
    def upload(self, serial: int) -> None:
        assert self.asked is None
        self.asked = serial
        self.begun.append(serial // 10)

    def settle(self, serial: int, *, is_whole: bool) -> None:
        if is_whole:
            self.pruned_below.append(serial // 10)
        else:
            self.dropped.add(serial // 10)

    # what happens to it
    def verify(self) -> None:
        self.verified += 1
        iteration = self.verified
        whole = Mark(1, iteration), self.serial(iteration)
        self.meeting.count(self.number, f"verified {iteration}", lambda: True, lambda _: self.on_whole(*whole))

    def finish(self, *, is_there: bool) -> None:
        if (serial := self.asked) is None:
            return
        self.asked = None
        if is_there:
            self.there.add(serial // 10)
            self.done.append(UploadedReport(iteration=serial // 10, serial=serial, size_bytes=1, upload_ns=1))
        else:
            self.done.append(PassedReport(serial=serial))


def go_on(meeting: Meeting, ranks: list[Rank]) -> None:
    """All hear what there is, look, and have uploaded what they were asked to."""
    while meeting.to_hear:
        meeting.hear(0)
    for rank in ranks:
        rank.turns.poll()
        if not rank.is_over:
            rank.finish(is_there=True)


def check(ranks: list[Rank]) -> None:
    longest = max((rank.begun for rank in ranks), key=len)
    for rank in ranks:
        assert rank.begun == longest[: len(rank.begun)]  # the same, in the same order
        assert len(longest) - len(rank.begun) <= 1
        for iteration in rank.pruned_below:
            assert all(iteration in each.there for each in ranks)
        assert not any(iteration in each.pruned_below for iteration in rank.dropped for each in ranks)
    assert longest == sorted(set(longest))


@given(st.integers(0, 2**32), st.integers(2, 4), st.booleans())
def test_ranks_upload_the_same_ones(seed: int, size: int, fails: bool) -> None:
    draw, meeting = random.Random(seed), Meeting(size)
    ranks = [Rank(number, meeting) for number in range(size)]
    kept = {iteration for iteration in range(1, 13) if draw.random() < 0.3}
    for _ in range(draw.randint(0, 150)):
        rank = draw.choice(ranks)
        what = draw.choice(["verify", "poll", "poll", "finish", "hear", "hear"])
        if what == "verify" and rank.verified < 12:
            if rank.verified + 1 in kept:
                rank.turns.keep(rank.verified + 1)
            rank.verify()
        elif what == "poll":
            rank.turns.poll()
        elif what == "finish":
            rank.finish(is_there=not fails or draw.random() < 0.5)
        elif what == "hear" and meeting.to_hear:
            meeting.hear(draw.randrange(len(meeting.to_hear)))
        check(ranks)
    for rank in ranks:
        while rank.verified < 12:
            rank.verify()
    for _ in range(60):
        go_on(meeting, ranks)
        check(ranks)
    assert all(rank.begun[-1] == 12 for rank in ranks)
    assert all(12 in rank.there and rank.pruned_below[-1] == 12 for rank in ranks)
    for rank in ranks:  # what some rank has not is left with none
        assert all(
            iteration in rank.dropped or all(iteration in each.there for each in ranks) for iteration in rank.there
        )


@given(st.integers(2, 4))
def test_what_is_kept_is_not_overtaken(size: int) -> None:
    meeting = Meeting(size)
    ranks = [Rank(number, meeting) for number in range(size)]
    for iteration in (1, 2, 3, 4, 5):
        for rank in ranks:
            if iteration in (2, 4):
                rank.turns.keep(iteration)
            rank.verify()
    for _ in range(20):
        go_on(meeting, ranks)
    assert all(rank.begun == [2, 4, 5] for rank in ranks)


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_all_are_told_once_one_uploads_no_more(seed: int, size: int) -> None:
    draw, meeting = random.Random(seed), Meeting(size)
    ranks = [Rank(number, meeting) for number in range(size)]
    ends = draw.randint(1, 60)
    for moment in range(120):
        rank = draw.choice(ranks)
        if moment == ends:
            ranks[0].is_over = True
        if draw.random() < 0.3 and rank.verified < 12:
            rank.verify()
        rank.turns.poll()
        if not rank.is_over:
            rank.finish(is_there=True)
        if meeting.to_hear:
            meeting.hear(0)
    for last in (12, 13):  # who has uploaded the newest has nothing to hear before there is a newer one
        for rank in ranks:
            while rank.verified < last:
                rank.verify()
        for _ in range(60):
            go_on(meeting, ranks)
    assert not ranks[0].told
    assert all(len(rank.told) == 1 for rank in ranks[1:])
    for rank in ranks[1:]:  # what the one that uploads no more has not is left with none
        assert all(iteration in rank.dropped or iteration in ranks[0].there for iteration in rank.there)
