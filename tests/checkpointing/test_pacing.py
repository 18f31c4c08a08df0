"""An interval that keeps to a budget: it follows what checkpoints cost, and no change of it tears one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkflow
from checkflow import hardware
from checkflow.checkpointing import pacing
from checkflow.checkpointing.pacing import Backoff, Measured
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.runtime.device import Batch
from checkflow.runtime.host import HostDevice
from checkflow.schedule import Schedule
from checkflow.trace import trace_training

COPY_S = 0.01


def training() -> checkflow.Training:
    """Large enough that nothing is copied within step()."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())  # looped: no anchor inside, so that some of it is copied

    def iterate() -> None:
        torch.autograd.backward(model(torch.randn(4, 256)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iterate)


def schedule_of(policy: str = "checkflow", share: float = 1.2) -> Schedule:
    """For a link that just carries the state, so that some of it is copied before."""
    graph = trace_training(training, model="paced", cuda_defaults=False).graph
    graph = hardware.retime(graph, hardware.load_profile("rtx3090"))
    state = sum(graph.tensors[index].size_bytes for index in graph.written_state)
    bandwidth = int(share * state * 10**9 / graph.iteration_time_ns)
    compiled = compile_graph(graph, Options(bandwidth, policy=policy))
    assert isinstance(compiled, Compiled)
    return compiled.schedule


def state_of(made: checkflow.Training) -> list[bytes]:
    (model,), (optimizer,) = made.models, made.optimizers
    entries = [entry for one in optimizer.state.values() for entry in one.values()]
    return [bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in (*model.state_dict().values(), *entries)]


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each copy takes at least, in seconds."""
    seconds = [0.0]
    copy: Callable[[HostDevice, Batch], None] = HostDevice._copy

    def slow(device: HostDevice, batch: Batch) -> None:
        if seconds[0]:  # asleep for no time costs as much as an iteration here
            time.sleep(seconds[0])
        copy(device, batch)

    monkeypatch.setattr(HostDevice, "_copy", slow)
    monkeypatch.setattr(pacing, "SPAN_NS", 50_000_000)
    return seconds


@pytest.mark.parametrize("policy", ["checkflow", "checkfreq", "checkfreq_cpu"])
def test_the_interval_follows_what_checkpoints_cost(policy: str, slowed: list[float], tmp_path: Path) -> None:
    """While something slows the link it grows; once that has gone it is that of the schedule again."""
    events: list[checkflow.Event] = []
    made = training()
    with checkflow.attach(
        made.model, made.optimizer, schedule=schedule_of(policy), store=tmp_path / "store", overhead=0.2,
        when_full="wait", on_event=events.append, tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        slowed[0] = COPY_S
        intervals = [1]
        for iteration in range(1, 5001):
            made.iteration()
            ckpt.step()
            paced = [event for event in events if isinstance(event, checkflow.Paced)]
            if len(paced) == len(intervals):
                intervals.append(paced[-1].interval)
                assert (paced[-1].before, paced[-1].iteration) == (intervals[-2], iteration)
                if slowed[0] and intervals[-1] > 2 and paced[-1].overhead < 1:
                    slowed[0] = 0.0
            if not slowed[0] and intervals[-1] == 1:
                break
    assert max(intervals) > 2 and intervals[-1] == 1, intervals
    first = next(event for event in events if isinstance(event, checkflow.Paced))
    assert first.overhead > first.budget == 0.2 and first.metrics["checkflow/interval_iterations"] == intervals[1]


def test_iterations_before_a_restore_are_not_measured(slowed: list[float], tmp_path: Path) -> None:
    """A training that resumes far on has not made all that in a second, at no cost."""
    made, measured = training(), list[Measured]()
    options: dict[str, Any] = {
        "schedule": schedule_of(), "store": tmp_path / "store", "when_full": "wait", "tell": lambda _: None,
    }  # fmt: skip
    with checkflow.attach(made.model, made.optimizer, **options) as ckpt:
        for _ in range(300):
            made.iteration()
            ckpt.step()
    slowed[0], made = COPY_S, training()
    with checkflow.attach(made.model, made.optimizer, overhead=0.9, **options) as ckpt:
        assert ckpt.restore() == 300 and ckpt._pacing is not None
        backoff = ckpt._pacing._backoff
        keep = backoff.next
        backoff.next = lambda before, found: measured.append(found) or keep(before, found)  # type: ignore[method-assign, func-returns-value]
        while not measured:
            made.iteration()
            ckpt.step()
    assert measured[0].iterations < 100


def test_no_change_of_the_interval_tears_a_checkpoint(slowed: list[float], tmp_path: Path) -> None:
    """Whenever it changes, to whatever: each checkpoint has the bytes of the end of its iteration."""
    rolls, made, schedule = random.Random(5).choices(range(1, 10), k=60), training(), schedule_of()
    assert any(row.snapshot is not None for row in schedule.actions)
    slowed[0] = 0.002
    expected: dict[int, list[bytes]] = {}
    intervals = set()

    def attached(one: checkflow.Training, store: Path) -> checkflow.Checkpointer:
        return checkflow.attach(
            one.model, one.optimizer, schedule=schedule, store=store, when_full="wait", tell=lambda _: None,
            persist_every=checkflow.PersistEvery(iterations=1), retention=checkflow.Retention(last=100),
        )  # fmt: skip

    with attached(made, tmp_path / "store") as ckpt:
        for iteration in range(1, 61):
            made.iteration()
            expected[iteration] = state_of(made)
            if rolls[iteration - 1] <= 5:
                ckpt._executor.pace(rolls[iteration - 1])
            ckpt.step()
            intervals.add(ckpt._executor.interval)
        assert not ckpt.stats().discarded
    assert intervals == {1, 2, 3, 4, 5}
    found = sorted(int(path.name.split("-")[-1]) for path in (tmp_path / "store").glob("0*"))
    assert len(found) > 15
    for iteration in found:
        again = training()
        with attached(again, tmp_path / "store") as ckpt:
            assert ckpt.restore(iteration) == iteration
            assert state_of(again) == expected[iteration]


def test_checkfreq_s_example() -> None:
    """A checkpoint that costs an iteration, and 5%: every 20th."""
    assert Measured(iterations=30, checkpoints=3, elapsed_ns=33, stall_ns=3).interval_for(0.05) == 20


@given(
    st.builds(Measured, st.integers(1, 99), st.integers(1, 99), st.integers(100, 10**6), st.integers(0, 99)),
    st.floats(0.001, 0.5),
)
def test_the_interval_is_the_least_that_keeps_to_the_budget(measured: Measured, budget: float) -> None:
    """Checkpoints that cost as much at that interval keep to it, and not at one less."""
    interval = measured.interval_for(budget)
    each_ns = measured.stall_ns / measured.checkpoints
    iteration_ns = (measured.elapsed_ns - measured.stall_ns) / measured.iterations if measured.stall_ns else 1
    assert each_ns <= budget * interval * iteration_ns * (1 + 1e-9)
    assert interval == 1 or each_ns > budget * (interval - 1) * iteration_ns * (1 - 1e-9)


def settled(write: Callable[[int], float], copy: float, budget: float) -> tuple[float, int]:
    """The overhead of a thousand measurements, and the last interval; times are in iterations, 1000 ns each.

    A checkpoint copies, and waits for what the disk has not written yet of the one before.
    """
    backoff, interval, waited, trained = Backoff(budget, 1), 1, 0.0, 0
    for number in range(1000):
        stall = copy + max(0.0, write(number) - interval)
        iterations = 3 * interval
        waited, trained = waited + 3 * stall, trained + iterations
        elapsed_ns = round(1000 * (iterations + 3 * stall))
        interval = backoff.next(interval, Measured(iterations, 3, elapsed_ns, round(3000 * stall)))
    return waited / trained, interval


@given(st.floats(0, 30), st.floats(0, 0.5), st.sampled_from([0.01, 0.05, 0.2]))
def test_it_settles_within_its_budget(write: float, copy: float, budget: float) -> None:
    """However steeply costs rise below some interval: what is tried in vain is within a fifth of the budget."""
    overhead, _ = settled(lambda _: write, copy, budget)
    assert overhead <= 1.2 * budget + 0.002


def test_it_comes_back_once_the_disk_is_free() -> None:
    _, interval = settled(lambda number: 40.0 if number < 900 else 0.5, 0.0, 0.05)
    assert interval == 1


@pytest.mark.parametrize("overhead", [0.0, 1.0, -0.1, float("nan")])
def test_a_budget_that_is_none_is_refused(overhead: float, tmp_path: Path) -> None:
    made = training()
    with pytest.raises(checkflow.InputError, match=r"overhead: .* is not in \(0, 1\); 0.05 is 5%"):
        checkflow.attach(made.model, made.optimizer, store=tmp_path / "store", overhead=overhead)


def test_parts_have_the_interval_that_they_were_planned_for(tmp_path: Path) -> None:
    made, schedule = training(), schedule_of("lowdiff", 2)
    assert schedule.lanes > 1
    with pytest.raises(checkflow.InputError, match="overhead: this schedule takes its checkpoints in parts"):
        checkflow.attach(made.model, made.optimizer, schedule=schedule, store=tmp_path / "store", overhead=0.05)
