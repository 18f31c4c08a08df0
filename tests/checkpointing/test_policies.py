"""Every policy's schedule on the host: what it costs is what it certifies, and what it saved comes back."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import checkflow
from checkflow import hardware, policies
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.runtime.counters import Cause
from checkflow.runtime.device import Batch, Snapshot
from checkflow.runtime.host import HostDevice
from checkflow.schedule import Schedule
from checkflow.trace import trace_training

PLANNED = ("checkflow", "gockpt", "lowdiff", "lowdiff_plus", "rolling")  # never pause
ITERATIONS = 5
COPY_S = 0.06  # each copy takes at least so long


def training() -> checkflow.Training:
    """2 MiB of weights and as much momentum; no buffers."""
    torch.manual_seed(5)
    return of_layers(torch.nn.ReLU(), torch.nn.Linear(512, 512))


def of_layers(*more: torch.nn.Module) -> checkflow.Training:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), *more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def iterate() -> None:
        torch.autograd.backward(model(torch.ones(4, 512)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iterate)


def schedule_of(policy: str, interval: int, factory: Callable[[], checkflow.Training] = training) -> Schedule:
    """For a link that carries half of the state in so many iterations; what is planned needs all of it."""
    traced = trace_training(factory, model="small", cuda_defaults=False)
    graph = hardware.retime(traced.graph, hardware.load_profile("rtx3090"))
    state = sum(graph.tensors[index].size_bytes for index in graph.written_state)
    share = 2 if policy in PLANNED else 0.5
    bandwidth = int(share * state * 10**9 / (graph.iteration_time_ns * interval))
    compiled = compile_graph(graph, Options(bandwidth, interval=interval, policy=policy))
    assert isinstance(compiled, Compiled)
    return compiled.schedule


def attached(
    made: checkflow.Training, schedule: Schedule, store: Path, on_event: Callable[[checkflow.Event], None] | None = None
) -> checkflow.Checkpointer:
    return checkflow.attach(
        made.model, made.optimizer, schedule=schedule, store=store, when_full="wait", tell=lambda _: None,
        on_event=on_event,
    )  # fmt: skip


def state_of(made: checkflow.Training) -> dict[str, torch.Tensor]:
    (model,), (optimizer,) = made.models, made.optimizers
    momenta = {str(n): one["momentum_buffer"] for n, one in enumerate(optimizer.state.values())}
    return {name: tensor.detach().clone() for name, tensor in {**model.state_dict(), **momenta}.items()}


@pytest.fixture
def held(policy: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of snapshots that there are, after each change.

    Copies are slow, and those of a policy that pauses begin when training waits, however fast or slow that is.
    """
    counts = [0]
    take: Callable[[HostDevice, Sequence[torch.Tensor]], list[Snapshot]] = HostDevice.snapshot
    copy: Callable[[HostDevice, Batch], None] = HostDevice._copy
    finish: Callable[[HostDevice, int, float | None], bool] = HostDevice._await
    waits = threading.Event()

    def snapshot(device: HostDevice, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        made = take(device, sources)
        for one in made:
            counts.append(counts[-1] + one.data.numel())
            weakref.finalize(one.data, lambda size: counts.append(counts[-1] - size), one.data.numel())
        return made

    def slow(device: HostDevice, batch: Batch) -> None:
        if policy not in PLANNED and threading.current_thread() is device._thread:
            waits.wait(60)
        time.sleep(COPY_S)
        copy(device, batch)

    def finishing(device: HostDevice, order: int, timeout_s: float | None) -> bool:
        waits.set()
        try:
            return finish(device, order, timeout_s)
        finally:
            waits.clear()

    monkeypatch.setattr(HostDevice, "snapshot", snapshot)
    monkeypatch.setattr(HostDevice, "_copy", slow)
    monkeypatch.setattr(HostDevice, "_await", finishing)
    return counts


@pytest.mark.parametrize(("policy", "interval"), [*((name, 1) for name in policies.names()), ("checkfreq", 2)])
def test_a_policy_runs_as_it_is_certified(policy: str, interval: int, held: list[int], tmp_path: Path) -> None:
    """It pauses for each checkpoint, holds the snapshots that it said, and what it saved is bit-identical."""
    schedule, made = schedule_of(policy, interval), training()
    certificate = schedule.certificate
    assert (certificate.pause_ns > 0) == (policy not in PLANNED)
    with attached(made, schedule, tmp_path / "store") as ckpt:
        assert ckpt.restore() == 0
        expected = {}
        for iteration in range(1, ITERATIONS + 1):
            made.iteration()
            expected[iteration] = state_of(made)
            ckpt.step()
        stats = ckpt.stats()
    checkpoints = ITERATIONS // interval
    assert stats.started == checkpoints and not stats.skipped and not stats.discarded
    pauses = stats.waits_by_cause.get(Cause.PAUSE, 0)
    ended = {"synchronous": 0, "checkfreq": interval, "checkfreq_cpu": 1}  # iterations to the pause from its own
    if policy in PLANNED:
        assert not pauses
    else:
        due = [c for c in range(interval, ITERATIONS + 1, interval) if c + ended[policy] <= ITERATIONS]
        assert pauses == len(due)
        assert stats.stall_ns_by_cause[Cause.PAUSE] >= len(due) * COPY_S * 1e9
        assert not set(stats.stall_ns_by_cause) & {Cause.OPTIMIZER, Cause.FORWARD, Cause.RELEASE}
    assert stats.snapshot_bytes == checkpoints * (certificate.snapshot_bytes - schedule.held_bytes())
    if policy == "checkfreq":
        assert max(held) == certificate.snapshot_bytes == schedule.state_bytes
    again, told = training(), list[checkflow.Event]()
    with attached(again, schedule, tmp_path / "store", on_event=told.append) as ckpt:
        last = ckpt.restore()
        assert last == ITERATIONS  # closing saved it, where no checkpoint was due
        found = state_of(again)
    (resumed,) = (event for event in told if isinstance(event, checkflow.Resumed))
    assert (resumed.replay_seconds is not None) == bool(schedule.gradients and not schedule.replica)
    assert ("to make updates again" in str(resumed)) == ("checkflow/replay_seconds" in resumed.metrics)
    assert found.keys() == expected[last].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected[last].items())


@pytest.mark.parametrize("interval", [1, 2])
def test_another_interval_is_refused_where_the_pause_is_between_checkpoints(interval: int, tmp_path: Path) -> None:
    """Training would stand still elsewhere than before the next checkpoint."""
    made, store = training(), tmp_path / "store"
    schedule = schedule_of("checkfreq", interval)
    with pytest.raises(InputError, match=f"interval: 3 is not the {interval} .* --interval 3") as error:
        checkflow.attach(made.model, made.optimizer, schedule=schedule, store=store, interval=3)
    assert "\n" not in str(error.value) and not store.exists()


def test_another_interval_is_taken_where_the_pause_stays_where_it_is(tmp_path: Path) -> None:
    """At the end of each iteration that is saved, whichever that is."""
    made = training()
    schedule = schedule_of("synchronous", 1)
    with checkflow.attach(
        made.model, made.optimizer, schedule=schedule, store=tmp_path / "s", interval=3, tell=lambda _: None
    ) as ckpt:
        ckpt.restore()
        for _ in range(7):
            made.iteration()
            ckpt.step()
        assert ckpt.stats().started == 2


def with_buffers() -> checkflow.Training:
    torch.manual_seed(5)
    return of_layers(torch.nn.BatchNorm1d(512))


@pytest.mark.parametrize("policy", policies.names())
def test_a_schedule_that_leaves_out_bytes_is_not_followed(policy: str, tmp_path: Path) -> None:
    """Whatever row is lost, and of an object, too, whose digest nobody looks at: each is needed, whoever planned it."""
    schedule = schedule_of(policy, 1, with_buffers)
    for number in range(len(schedule.actions)):
        rows = (*schedule.actions[:number], *schedule.actions[number + 1 :])
        with pytest.raises(InputError, match=r"^schedule: .*; compile it again$"):
            attached(with_buffers(), schedule.model_copy(update={"actions": rows}), tmp_path / "store")
    for gradient in schedule.gradients:
        kept = {
            "actions": tuple(row for row in schedule.actions if row.tensor != gradient.id),
            "gradients": tuple(row for row in schedule.gradients if row != gradient),
        }
        with pytest.raises(InputError, match="saved as it was in an earlier iteration, and no gradient"):
            attached(with_buffers(), schedule.model_copy(update=kept), tmp_path / "store")
    assert not (tmp_path / "store").exists()
