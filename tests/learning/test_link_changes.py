"""A link that comes to carry less than was planned for, or more: another schedule is learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from handmade import TIGHT
from slow_link import copies_take

import checkflow
from checkflow.learning import learner
from checkflow.learning import link as watching
from checkflow.store.memory.trainer_slots import WhenFull
from checkflow.store.trainer.persist_every import PersistEvery

ITERATION_S = 0.02
STATE_BYTES = 3 * 4 * (256 * 256 + 256)
LONG_S = 120.0
ASKED = ("planning", "planned")  # the planner may have answered before anybody looks


class Link:
    """What copies of the host's device take: so many bytes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        copies_take(monkeypatch, lambda batch: batch.size_bytes / self.bytes_per_s)
        monkeypatch.setattr(watching, "ENOUGH_BYTES", 1)


def iterations(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int = 8,
    takes_s: Callable[[], float] = lambda: ITERATION_S,
) -> Iterator[None]:
    x = torch.randn(200, 200)
    while True:
        model(torch.randn(rows, 256)).square().mean().backward()
        until = time.perf_counter() + takes_s()
        while time.perf_counter() < until:
            torch.mm(x, x)
        optimizer.step()
        optimizer.zero_grad()
        yield


MB = 10**6
SLOW = {"bytes": 60 * MB, "busy_ns": 10**9}  # of a planned 100 MB/s
FAST = {"bytes": 210 * MB, "busy_ns": 10**9}
TIMELESS = {"iteration_time_ns": 0}  # no iteration is shorter than those that were planned for


@pytest.mark.parametrize(
    ("now", "plan", "due"),
    [
        (SLOW, {}, False),  # which nobody feels
        (SLOW | {"waited_ns": 10**12}, {}, True),
        (SLOW | {"skipped": 1}, {}, True),
        (SLOW | {"skipped": 1, "begun": 100}, {}, False),
        (SLOW | {"bytes": 80 * MB, "skipped": 1}, {}, False),
        ({"bytes": 16 * MB, "busy_ns": 10**9, "skipped": 1}, {}, False),  # too few to know
        (FAST, {}, False),  # there is nothing to gain
        (FAST, {"lanes": 2}, True),
        (FAST, {"interval": 2}, True),
        (FAST | {"bytes": 190 * MB}, {"interval": 2}, False),
    ],
)
def test_another_plan_is_due_where_it_would_help(now: dict[str, int], plan: dict[str, int], due: bool) -> None:
    followed = TIGHT.model_copy(update={"interval": 1, "bandwidth_bytes_per_s": 100 * MB, **TIMELESS, **plan})
    watch = watching.LinkWatch(None)
    assert not watch.changed(watching.Copied(**now), 1, 20)
    watch = watching.LinkWatch(None)
    assert watch.asks(watching.Copied(bytes=100 * MB, busy_ns=10**9)) == 100 * MB
    watch.follows(followed)
    now = {name: value + {"bytes": 100 * MB, "busy_ns": 10**9}.get(name, 0) for name, value in now.items()}
    why = watch.changed(watching.Copied(**now), 1, 20)
    assert why.startswith("the link carries ") == bool(why) == due
    assert not watch.changed(watching.Copied(**now), 1, 20), "what was looked at is not looked at again"
    if due:  # what it carries since then is planned for
        since = {"bytes": now["bytes"] + 50 * MB, "busy_ns": now["busy_ns"] + 10**9}
        assert watch.asks(watching.Copied(**since)) == 50 * MB


@pytest.mark.parametrize(
    ("took_ms", "link", "waited_ms", "said"),
    [
        (60, 100, 0, ""),  # which nobody feels
        (60, 100, 80, "100 MB/s in iterations of 60.0 ms, and was planned to carry 100 MB/s in 100 ms"),
        (60, 200, 80, ""),  # the link makes up for it
        (80, 80, 80, "80.0 MB/s, and was planned to carry 100 MB/s"),  # neither alone would do
        (90, 90, 80, ""),
        (300, 60, 80, "60.0 MB/s, and was planned to carry 100 MB/s"),  # as an evaluation between iterations makes them
    ],
)
def test_iterations_that_are_shorter_than_planned_leave_less_time(
    took_ms: int, link: int, waited_ms: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 iterations; what training waited is none of their time."""
    clock = iter((0, 20 * (took_ms + waited_ms) * 10**6, 0))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    watch = watching.LinkWatch(
        TIGHT.model_copy(update={"bandwidth_bytes_per_s": 100 * MB, "iteration_time_ns": 100 * 10**6})
    )
    now = watching.Copied(bytes=link * MB, busy_ns=10**9, waited_ns=20 * waited_ms * 10**6)
    assert watch.changed(now, 1, 20) == (said and f"the link carries {said}")


def test_what_it_carries_is_known_though_little_was_copied_since() -> None:
    watch = watching.LinkWatch(TIGHT.model_copy(update={"bandwidth_bytes_per_s": 100 * MB}))
    looked = watching.Copied(bytes=90 * MB, busy_ns=10**9)
    assert not watch.changed(looked, 1, 20)
    assert watch.carries(watching.Copied(bytes=91 * MB, busy_ns=2 * 10**9)) == 90 * MB
    assert watch.carries(watching.Copied(bytes=190 * MB, busy_ns=2 * 10**9)) == 100 * MB


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([], watching.UNKNOWN_BYTES_PER_S),
        ([(5 * MB, 1.0)], 5 * MB),  # few are better than nothing
        ([(5 * MB, 1.0), (6 * MB, 0.1)], 60 * MB),
        ([(5 * MB, 0.01), (100 * MB, 1.0)], 100 * MB),  # that much at once is a link's
        ([(100 * MB, 1.0), (100 * MB, 0.1), (100 * MB, 0.5)], 1000 * MB),  # the first slots were new
    ],
)
def test_what_a_plan_is_made_for_is_what_the_fastest_iteration_had(seen: list[tuple[int, float]], found: int) -> None:
    watch, now = watching.LinkWatch(None), watching.Copied()
    for copied_bytes, seconds in seen:
        now = watching.Copied(bytes=now.bytes + copied_bytes, busy_ns=now.busy_ns + round(seconds * 1e9))
        watch.saw(now)
        watch.saw(now)  # an iteration in which no copy ended
    assert watch.asks(now) == found


def test_a_link_that_changes_is_planned_for_as_it_is_on_average() -> None:
    """One fast iteration among slow ones is no reason to ask for the same plan again."""
    watch, now = watching.LinkWatch(None), watching.Copied(bytes=100 * MB, busy_ns=10**9)
    assert watch.asks(now) == 100 * MB
    watch.follows(TIGHT.model_copy(update={"interval": 1, "bandwidth_bytes_per_s": 100 * MB}))
    for busy_ns in [4 * 10**9, 10**9, 4 * 10**9, 4 * 10**9]:
        now = watching.Copied(bytes=now.bytes + 100 * MB, busy_ns=now.busy_ns + busy_ns)
        watch.saw(now)
    assert watch.asks(now) == 400 * MB // 13


def test_a_link_grows_once() -> None:
    watch, now = watching.LinkWatch(None), watching.Copied(bytes=100 * MB, busy_ns=10**9)
    assert not watch.grew(now), "nothing was asked of what it carried"
    watch.asks(now)
    for grown in (False, True, False, False, True):
        rate = {False: 1.5, True: 3.0}[grown] * watch._tried
        now = watching.Copied(bytes=now.bytes + round(rate), busy_ns=now.busy_ns + 10**9)
        assert watch.grew(now) == grown


def test_a_plan_awaits_what_has_begun() -> None:
    watch = watching.LinkWatch(None)
    assert not watch.awaits(watching.Copied(), 100 * MB), "its first checkpoint is far away"
    assert watch.awaits(watching.Copied(begun=1), 100 * MB)
    assert watch.awaits(watching.Copied(begun=2, bytes=1 * MB, busy_ns=10**7), 100 * MB)
    assert not watch.awaits(watching.Copied(begun=2, bytes=1 * MB, busy_ns=10**7), 1 * MB)
    assert not watch.awaits(watching.Copied(begun=2, bytes=100 * MB, busy_ns=10**9), 100 * MB)


def test_first_copies_that_are_slow_do_not_stand_in_the_way_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tried again here: what is learned is learned at first. A busy machine may take five tries."""
    told = list[str]()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def goes_well(store: Path) -> bool:
        told.clear()
        link = Link(monkeypatch, STATE_BYTES / 0.5)
        with checkflow.attach(
            model, optimizer, store=store, interval=1, when_full="wait",
            persist_every=PersistEvery(iterations=50), tell=told.append, notify=told.append,
        ) as ckpt:  # fmt: skip
            for _ in iterations(model, optimizer):
                ckpt.step()
                if ckpt.learning != "settling":
                    link.bytes_per_s = 20 * STATE_BYTES / ITERATION_S
                if ckpt.learning == "knowing":
                    return bool(ckpt.stats().learned_in)
        return False

    assert any(goes_well(tmp_path / str(number)) for number in range(5)), told


def test_where_no_other_plan_is_to_be_had_the_one_in_force_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And other iterations are learned as ever."""
    fast, slow = 20 * STATE_BYTES / ITERATION_S, 0.1 * STATE_BYTES / ITERATION_S
    link, told = Link(monkeypatch, fast), list[str]()
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def count(text: str) -> int:
        return sum(text in line for line in told)

    def goes_on(store: Path) -> bool:
        """False where a busy machine's link did not carry the first plan either."""
        told.clear()
        with checkflow.attach(
            model, optimizer, store=store, interval=1, when_full="wait",
            persist_every=PersistEvery(iterations=50), tell=told.append, notify=told.append,
        ) as ckpt:  # fmt: skip
            ckpt.restore()
            for rate, rows, text in (
                (fast, 8, "learned its"),
                (slow, 8, "no schedule was"),
                (fast, 16, "iterations are"),
            ):
                link.bytes_per_s, deadline = rate, time.monotonic() + LONG_S
                training = iterations(model, optimizer, rows)
                while not count(text):
                    if text == "learned its" and count("no schedule was"):
                        return False
                    assert time.monotonic() < deadline, told
                    next(training)
                    ckpt.step()
        return True

    assert any(goes_on(tmp_path / str(number)) for number in range(5))


@pytest.mark.parametrize("grown", [False, True])
def test_a_link_that_carries_no_plan_is_tried_again(
    grown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once that it does not; and when it does, a schedule is learned, soon where that is seen at once."""
    monkeypatch.setattr(learner, "_AGAIN", 10**6 if grown else 4)
    monkeypatch.setattr(learner, "_WINDOW", 4)
    link, told = Link(monkeypatch, 0.1 * STATE_BYTES / ITERATION_S), list[str]()
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    mean = model.weight.detach().clone()  # which nobody lists
    with checkflow.attach(
        model, optimizer, store=tmp_path / "store", interval=1, when_full="wait",
        persist_every=PersistEvery(iterations=50), tell=told.append, notify=told.append,
    ) as ckpt:  # fmt: skip
        asked, deadline = 0, time.monotonic() + LONG_S
        for _ in iterations(model, optimizer):
            with torch.no_grad():
                mean.lerp_(model.weight, 0.1)
            before = ckpt.learning
            ckpt.step()
            asked += before not in ASKED and ckpt.learning in ASKED
            if asked == (1 if grown else 3):
                link.bytes_per_s = 20 * STATE_BYTES / ITERATION_S
            if ckpt.stats().learned_in:
                break
            assert time.monotonic() < deadline, (asked, told)
    assert asked > (1 if grown else 3)
    for what in ("no schedule was learned", "in no checkpoint"):
        assert sum(what in line for line in told) == 1, told
    assert not any("learns its schedule anew" in line for line in told), told


@contextmanager
def trained(
    store: Path,
    when_full: WhenFull,
    intervals: list[int],
    told: list[str],
    takes_s: Callable[[], float] = lambda: ITERATION_S,
) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Goes on until something is so of the `intervals` that were learned, of which there is one then."""

    def learned(event: checkflow.Event) -> None:
        if isinstance(event, checkflow.Learned):
            intervals.append(event.interval)

    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(
        model, optimizer, store=store, when_full=when_full, on_event=learned,
        persist_every=PersistEvery(iterations=50), tell=told.append, notify=told.append,
    ) as ckpt:  # fmt: skip
        ckpt.restore()
        training = iterations(model, optimizer, takes_s=takes_s)

        def go_on(until: Callable[[], bool]) -> None:
            deadline = time.monotonic() + LONG_S
            while not intervals or not until():
                assert time.monotonic() < deadline, (intervals, told)
                next(training)
                ckpt.step()

        yield go_on


@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_a_schedule_is_learned_for_what_the_link_carries_now(
    when_full: WhenFull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower: fewer checkpoints, which leave in time; and as many as at first once it is as fast as it was.

    What is learned while the machine stalls is learned again.
    """
    fast, slow = 20 * STATE_BYTES / ITERATION_S, 0.1 * STATE_BYTES / ITERATION_S
    link = Link(monkeypatch, fast)
    intervals, told = list[int](), list[str]()
    with trained(tmp_path / "store", when_full, intervals, told) as go_on:
        for rate, carries in ((fast, {1, 2}), (slow, set(range(3, 100))), (fast, {1, 2})):
            link.bytes_per_s = rate
            go_on(partial(lambda carries: intervals[-1] in carries, carries))
    assert sum("learns its schedule anew: the link carries" in line for line in told) >= 2, told


@pytest.mark.parametrize("states", [0.6, 1.5])  # that the link carries in a slow iteration
@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_a_schedule_is_learned_for_iterations_as_they_are_now(
    states: float, when_full: WhenFull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones are slow, as where data is fetched for the first time; the link carries the same all the time.

    What they wait for copies by the first plan is none of their time.
    """
    Link(monkeypatch, states * STATE_BYTES / (10 * ITERATION_S))
    intervals, told = list[int](), list[str]()
    with trained(
        tmp_path / "store", when_full, intervals, told, lambda: ITERATION_S if intervals else 10 * ITERATION_S
    ) as go_on:
        go_on(lambda: intervals[-1] * states / 10 >= watching.SLOWER)
