"""What ranks tell each other before training goes on, and who is named where one does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from processes import until
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

import checkflow
from checkflow.checkpointing.behind_ranks import Stock
from checkflow.checkpointing.known import Kept, exchange
from checkflow.checkpointing.seeking import Seeking
from checkflow.checkpointing.together import Together
from checkflow.distributed import group
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.fellows import strangers
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark, common, next_attempt
from checkflow.errors import InputError, PeerError
from checkflow.runtime.device import Batch
from checkflow.runtime.host import HostDevice
from checkflow.store.format.ranks import directory_of, note_whole, noted_whole
from checkflow.torch_ranks import MeetingPlace

result = TypeVar("result")


def groups(size: int, deadline_s: float = 20.0) -> list[Group]:
    store = HashStore()
    return [Group(rank, size, deadline_s, store, store) for rank in range(size)]


def together(ranks: list[Group], act: Callable[[Group], result]) -> list[result | BaseException]:
    """What each rank's call gives or raises."""
    found: dict[int, result | BaseException] = {}

    def run(group: Group) -> None:
        try:
            with group.telling():
                found[group.rank] = act(group)
        except BaseException as error:  # noqa: BLE001
            found[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[group.rank] for group in ranks]


def test_each_hears_all() -> None:
    ranks = groups(3)
    for _ in range(2):  # the second time is another occasion
        assert together(ranks, lambda group: group.gather("attach()", [group.rank])) == [[[0], [1], [2]]] * 3


def test_what_processes_said_that_are_gone_is_nothing_that_was_said() -> None:
    """torchrun starts ranks again, which meet in the store of the former ones; each time another one comes late."""
    store, meetings = HashStore(), set[object]()
    for life in range(4):

        def met(group: Group, life: int = life) -> str:
            time.sleep(0.2 * ((group.rank + life) % 3))
            return group._met()

        (meeting, *others) = together([Group(rank, 3, 20.0, store, store) for rank in range(3)], met)
        assert others == [meeting] * 2 and isinstance(meeting, str) and meeting not in meetings
        meetings.add(meeting)


def test_ranks_of_another_life_hear_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attaches once in its life; the first rank comes late, when the other has said all that it has to."""
    store, here = HashStore(), threading.local()
    monkeypatch.setattr(
        group, "meeting_place", lambda: MeetingPlace(here.rank, 2, lambda prefix: PrefixStore(prefix, store))
    )
    for life in range(3):

        def says(own: Group, life: int = life) -> list[object]:
            here.rank = own.rank
            time.sleep(0.0 if own.rank else 0.3)
            found = Group.here(20.0)
            assert found is not None
            return found.gather("attach()", [life, own.rank])

        assert together(groups(2), says) == [[[life, 0], [life, 1]]] * 2


def test_who_has_not_come_though_its_former_life_had_is_named() -> None:
    store = HashStore()
    together([Group(rank, 3, 20.0, store, store) for rank in range(3)], Group._met)
    again = [Group(rank, 3, 2.0, store, store) for rank in (0, 2)]
    for error in together(again, Group._met):
        assert isinstance(error, PeerError)
        assert str(error).startswith("attach(): rank 1 has not come to it within 2 s; call it on every rank")


def test_who_is_missing_is_named() -> None:
    ranks = groups(4, deadline_s=2.0)
    (error, _) = together([ranks[0], ranks[2]], lambda group: group.gather("restore()", None))
    assert isinstance(error, PeerError)
    line = "restore(): ranks 1, 3 have not come to it within 2 s; call it on every rank, and see whether all run"
    assert str(error) == line


def test_the_error_of_one_ends_the_waiting_of_all() -> None:
    def act(group: Group) -> list[object]:
        if group.rank == 1:
            raise InputError("model: has no parameter")
        return group.gather("attach()", None)

    began = time.monotonic()
    first, own, last = together(groups(3), act)
    assert time.monotonic() - began < 10
    assert str(first) == str(last) == "rank 1: model: has no parameter"
    assert isinstance(first, PeerError)
    assert isinstance(own, InputError)


def test_who_failed_meets_the_others_the_next_time() -> None:
    """Also where it has said less than they had before it failed."""
    ranks = groups(3)

    def fails(group: Group) -> None:
        group.gather("restore()", None)
        if group.rank == 1:
            raise InputError("model: has no parameter")
        group.gather("restore()", None)

    for _ in range(2):
        first, own, last = together(ranks, fails)
        assert isinstance(own, InputError) and isinstance(first, PeerError) and isinstance(last, PeerError)
        assert together(ranks, lambda group: group.gather("restore()", group.rank)) == [[0, 1, 2]] * 3


def test_who_comes_when_the_others_have_left_is_told_and_meets_them_the_next_time() -> None:
    ranks = groups(2)
    ranks[0].deadline_s = 0.2

    def twice(group: Group) -> None:
        for _ in range(2):
            group.gather("restore()", None)

    (early,) = together(ranks[:1], twice)
    (late,) = together(ranks[1:], twice)
    assert str(late) == str(early) and str(late).startswith("restore(): rank 1 has not come to it within 0.2 s; call")
    ranks[0].deadline_s = 20.0
    assert together(ranks, lambda group: group.gather("restore()", group.rank)) == [[0, 1]] * 2


def test_who_fails_after_all_have_said_something_is_heard_all_the_same() -> None:
    """The other one has looked for it just before, and looks for a failure just after."""
    first, second = groups(2)
    store = first.values

    class Slow:
        """The first rank says its own, hears the other and fails between two looks of the other."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            if (found := store.check(keys)) or len(keys) == 1:
                return found
            with pytest.raises(InputError), first.telling():
                first.gather("restore()", 0)
                raise InputError("restore: no")
            return False

    second.values = Slow()  # type: ignore[assignment]
    assert together([second], lambda group: group.gather("restore()", 1)) == [[0, 1]]


def test_who_could_not_attach_is_waited_for_no_more() -> None:
    """It failed when the others had all that they need of it."""
    first, second = groups(2)
    with first.telling(for_good=True):
        pass
    with pytest.raises(InputError), second.telling(for_good=True):
        raise InputError("store: no space")
    (error,) = together([first], lambda group: group.gather("restore()", None))
    assert str(error) == "rank 1: store: no space"


def test_the_first_rank_stays_until_the_others_have_heard_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of all may end with its process."""
    monkeypatch.setattr(group, "_HEARD_S", 60.0)
    heard: list[str] = []

    def attach(rank: Group) -> None:
        if rank.rank == 0:
            raise InputError("store: no space")
        time.sleep(0.3)
        try:
            rank.gather("attach()", None)
        except PeerError as error:
            heard.append(str(error))
            raise

    first, second = groups(2)
    late = threading.Thread(target=together, args=([second], attach))
    late.start()
    together([first], attach)
    assert heard == ["rank 0: store: no space"]
    late.join()


def test_what_differs_is_named_on_each() -> None:
    given = [{"slots": 3, "interval": 2}, {"slots": 3, "interval": 5}]
    for error in together(groups(2), lambda group: group.same("attach()", given[group.rank])):
        assert str(error) == "interval: is 2 on rank 0, but 5 on rank 1; give every rank the same"


def test_without_the_store_it_is_one_line() -> None:
    class Gone:
        def set(self, _key: str, _value: str) -> None:
            raise RuntimeError("Broken pipe\nException raised from sendBytes")

    group = Group(1, 2, 1.0, Gone(), Gone())  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=r"^the other ranks cannot be reached \(Broken pipe\); see whether rank 0"):
        group.gather("attach()", None)


def agreements(size: int) -> list[Agreement]:
    return [Agreement(group) for group in groups(size)]


def test_all_hear_what_the_last_one_rules() -> None:
    ranks = agreements(3)
    heard: list[tuple[int, bool | None]] = []
    asked: list[int] = []

    def say(rank: int, due: bool) -> None:
        def rules() -> bool:
            asked.append(rank)
            return due

        ranks[rank].staging(7, rules, lambda ruling: heard.append((rank, ruling)))()

    for rank, due in ((2, False), (0, False), (1, True)):
        assert not heard
        say(rank, due)
        time.sleep(0.05)
    until(lambda: len(heard) == 3)
    assert sorted(heard) == [(0, True), (1, True), (2, True)]
    assert asked == [1]
    for each in ranks:
        each.close()


def test_one_that_skips_speaks_for_all() -> None:
    first, second = agreements(2)
    heard: list[bool | None] = []
    first.staging(3, lambda: True, heard.append)()
    second.skipped(3)
    until(lambda: heard == [None])
    first.skipped(4)
    time.sleep(0.05)
    second.staging(4, lambda: True, heard.append)()
    until(lambda: heard == [None, None])
    first.attempt = second.attempt = 2  # after a restore: the same iteration again
    for each in (first, second):
        each.staging(3, lambda: False, heard.append)()
    until(lambda: heard == [None, None, False, False])
    first.close()
    second.close()


def test_who_says_a_thing_twice_counts_once_and_hears_twice() -> None:
    first, second = agreements(2)
    heard: list[int] = []
    for serial in (7, 9):
        first.verified(2, 15, serial, lambda: heard.append(1))
    time.sleep(0.2)
    assert not heard
    second.verified(2, 15, 4, lambda: heard.append(2))
    until(lambda: len(heard) == 3)
    first.verified(2, 15, 11, lambda: heard.append(1))  # forgotten by now
    until(lambda: len(heard) == 4)
    assert sorted(heard) == [1, 1, 1, 2]
    for each in (first, second):
        each.close()


def test_the_latest_of_all_is_known_to_each() -> None:
    """Whoever says so first or last; and who is so no more."""
    ranks = groups(4)
    agreed = {each.rank: Agreement(each) for each in ranks}
    assert not agreed[0].any_lags_more(0)

    def all_say(latest: int) -> None:
        for each in agreed.values():
            assert [each.any_lags_more(iterations) for iterations in range(8)] == [n < latest for n in range(8)]

    together(ranks, lambda each: agreed[each.rank].lags([2, 5, 1, 3][each.rank]))
    all_say(5)
    agreed[3].lags(6)
    all_say(6)
    agreed[3].lags(1)
    all_say(5)
    agreed[1].lags(1)
    all_say(2)


def test_ranks_that_read_as_a_whole_know_who_does_so_most_seldom() -> None:
    """Whoever says so first or last; and for good, for another rank may be at it."""
    ranks = groups(3)
    agreed = {each.rank: Agreement(each) for each in ranks}
    assert [each.whole_every() for each in agreed.values()] == [0, 0, 0]
    together(ranks, lambda each: agreed[each.rank].reads_whole([5, 4, 12][each.rank]))
    agreed[2].reads_whole(1)
    assert [each.whole_every() for each in agreed.values()] == [12, 12, 12]


def test_nobody_waits_for_what_another_rank_has_forgotten() -> None:
    """Of two matters of one name that wait for one ruling, the first makes this rank through, maybe as the last."""
    store = HashStore()
    looked, paused = threading.Event(), threading.Event()

    class Slow:
        """Pauses after it has seen a ruling."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
            found = store.compare_set(key, expected, wanted)
            if found == b"true" and expected == "?":
                looked.set()
                paused.wait(1.0)
            return found

    slow = Slow()
    first = Agreement(Group(0, 2, 20.0, slow, slow))  # type: ignore[arg-type]
    second = Agreement(Group(1, 2, 20.0, store, store))
    heard: list[str] = []
    for name in ("old", "new"):
        first.staging(15, lambda: True, lambda _, name=name: heard.append(name))()  # type: ignore[misc]
    second.staging(15, lambda: True, lambda _: heard.append("other"))()
    assert looked.wait(10)
    time.sleep(0.1)
    paused.set()
    until(lambda: len(heard) == 3)
    for each in (first, second):
        each.staging(16, lambda: True, lambda _: heard.append("next"))()
    until(lambda: len(heard) == 5)
    assert sorted(heard[:3]) == ["new", "old", "other"] and heard[3:] == ["next", "next"]
    for each in (first, second):
        each.close()


def test_who_gives_up_what_all_have_said_hears_what_they_ruled() -> None:
    """It said it had it, and then that it never would: others have acted on the first."""
    store = HashStore()

    class Deaf:
        """Finds no ruling where it looks for one."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
            return wanted.encode() if expected == wanted else store.compare_set(key, expected, wanted)

    deaf = Deaf()
    first = Agreement(Group(0, 2, 20.0, deaf, deaf))  # type: ignore[arg-type]
    second = Agreement(Group(1, 2, 20.0, store, store))
    heard: list[tuple[int, bool | None]] = []
    for rank, each in ((2, second), (1, first)):
        each.staging(3, lambda: True, lambda ruling, rank=rank: heard.append((rank, ruling)))()  # type: ignore[misc]
    until(lambda: bool(heard))
    assert heard == [(2, True)]
    first.skipped(3)
    until(lambda: len(heard) == 2)
    assert heard == [(2, True), (1, True)]
    for each in (first, second):
        each.close()


def test_what_not_all_had_staged_when_a_restore_began_is_void() -> None:
    """No slot waits for it; what is staged anew of the same iteration is another matter."""
    first, second = agreements(2)
    heard: list[tuple[str, bool | None]] = []
    first.staging(15, lambda: True, lambda ruling: heard.append(("old", ruling)))()
    time.sleep(0.1)
    assert not heard
    for each in (first, second):
        each.attempt = 1
        each.staging(15, lambda: True, lambda ruling: heard.append(("new", ruling)))()
    until(lambda: len(heard) == 3)
    assert sorted(heard, key=str) == [("new", True), ("new", True), ("old", None)]
    for each in (first, second):
        each.close()


def test_long_runs_leave_little_in_the_store() -> None:
    ranks = agreements(2)
    heard: list[bool | None] = []
    for iteration in range(300):
        for each in ranks:
            each.staging(iteration, lambda: False, heard.append)()
        until(lambda iteration=iteration: len(heard) == 2 * iteration + 2)  # type: ignore[misc]
    values = ranks[0]._group.values
    assert isinstance(values, HashStore)
    assert values.num_keys() < 10
    for each in ranks:
        each.close()


def test_who_comes_late_hears_what_was_ruled_all_the_same() -> None:
    """What it staged was on its way to another machine, while the others skipped hundreds."""
    early, late = agreements(2)
    heard: list[tuple[str, int, bool | None]] = []

    def stage(who: str, rank: Agreement, iteration: int) -> None:
        rank.staging(iteration, lambda: True, lambda ruling: heard.append((who, iteration, ruling)))()

    for iteration in range(3):
        stage("early", early, iteration)
    for iteration in range(3, 400):
        early.skipped(iteration)
    time.sleep(0.1)
    for iteration in range(400):
        stage("late", late, iteration)
    until(lambda: len(heard) == 403)
    assert {(iteration, ruling) for who, iteration, ruling in heard if who == "early"} == {(i, True) for i in range(3)}
    assert all(ruling == (True if iteration < 3 else None) for _, iteration, ruling in heard)
    values = early._group.values
    assert isinstance(values, HashStore)
    until(lambda: values.num_keys() < 10)
    stage("late", late, 399)  # what a rank knows it does not ask of others again
    until(lambda: heard[-1] == ("late", 399, None) and len(heard) == 404)
    early.close()
    late.close()


def test_trouble_is_told_once() -> None:
    class Gone:
        def add(self, _key: str, _amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    agreement = Agreement(Group(0, 2, 1.0, Gone(), Gone()))  # type: ignore[arg-type]
    agreement.staging(1, lambda: True, lambda _: None)()
    found: list[str | None] = []
    until(lambda: found.append(agreement.trouble()) or found[-1] is not None)  # type: ignore[func-returns-value]
    assert "nothing more is agreed on with the other ranks" in str(found[-1])
    assert "Connection reset by peer" in str(found[-1])
    assert agreement.trouble() is None


def test_what_is_common_is_of_one_iteration_and_one_attempt() -> None:
    one, other = [Mark(1, 5), Mark(2, 4), Mark(1, 3)], [Mark(1, 3), Mark(2, 5), Mark(1, 5)]
    assert common([one, other]) == (Mark(1, 5), Mark(1, 3))
    assert common([one, []]) == ()
    assert next_attempt([one, other]) == 3
    assert next_attempt([[], []]) == 1


def test_an_attempt_is_later_than_what_is_lost_in_part(tmp_path: Path) -> None:
    """Also of another number of ranks; else that would be told of for good."""
    lost = Mark(10**9, 4)
    said = exchange(Group.alone(), Kept({}, {}), Stock({}, is_known=True), {(lost, 2): frozenset({0})})
    assert next_attempt(said.known) > lost.attempt
    note_whole(tmp_path, 5)  # of a checkpoint that is gone, whose serial another one will have
    Together(Group.alone(), tmp_path, print).begin()
    assert noted_whole(tmp_path) == 0


def test_what_another_rank_left_on_this_machine_is_something_to_restore(tmp_path: Path) -> None:
    """Ranks may be on other machines than before; and no step() is taken beside what nobody has restored."""
    here = tmp_path / directory_of(0, 2)
    for rank, name in ((0, "00000001-iteration-4"), (1, "00000003-iteration-7")):
        (tmp_path / directory_of(rank, 2) / name).mkdir(parents=True)
    assert Seeking(groups(2)[0], tmp_path, here, lambda _: None).iterations() == [7]

    def strange(group: Group) -> frozenset[int]:
        return strangers(group, tmp_path if group.rank == 0 else tmp_path / "other")

    assert together(groups(2), strange) == [{1}, frozenset()]
    assert together(groups(2), lambda group: strangers(group, tmp_path)) == [frozenset()] * 2, "each writes here"


def test_what_is_in_flight_when_a_restore_begins_is_of_the_attempt_that_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training comes to the same iterations again, and would say of both that they are staged."""
    said: list[tuple[int, int]] = []
    staging = Agreement.staging

    def noted(self: Agreement, iteration: int, *rest: Any) -> Callable[[], None]:
        said.append((self.attempt, iteration))
        return staging(self, iteration, *rest)

    may_copy, copy = threading.Event(), HostDevice._copy

    def slowly(self: HostDevice, batch: Batch, /) -> None:
        may_copy.wait(20)
        copy(self, batch)

    monkeypatch.setattr(HostDevice, "_copy", slowly)
    monkeypatch.setattr(Agreement, "staging", noted)
    monkeypatch.setattr(Group, "here", lambda _deadline_s: Group.alone())
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(
        model, optimizer, store=tmp_path, when_full="wait", notify=lambda _: None, tell=lambda _: None
    ) as ckpt:
        for iteration in range(1, 7):
            torch.autograd.backward(model(torch.randn(2, 512)).square().mean())
            may_copy.set()
            optimizer.step()
            if iteration == 6:
                may_copy.clear()
            ckpt.step()
            if iteration == 3:
                ckpt.save()
        first = {attempt for attempt, _ in said}
        assert len(first) == 1 and (max(first), 6) not in said, "the last one is in flight"
        may_copy.set()
        assert ckpt.restore(3) == 3
        assert (max(first), 6) in said and {attempt for attempt, _ in said} == first


def test_who_trains_on_when_nothing_is_agreed_on_any_more_has_an_error_once() -> None:
    """A line is told at once; that iterations are staged since, for nobody, is an error."""

    class Gone:
        def __getattr__(self, _name: str) -> Callable[..., Any]:
            def fails(*_: object) -> None:
                raise RuntimeError("Broken pipe")

            return fails

    gone: Any = Gone()
    agreement = Agreement(Group(0, 2, 60.0, gone, gone))
    agreement.skipped(1)
    until(lambda: bool(agreement._ended_by))
    assert "nothing more is agreed on" in (agreement.trouble() or "") and agreement.failure() is None
    for iteration in range(2, 5):
        agreement.staging(iteration, lambda: False, lambda _: None)()
        assert ("nothing more is agreed on" in (agreement.failure() or "")) is (iteration == 2)
    assert agreement._said.empty()
    agreement.close()
