"""A replica that another process brings on: its checkpoints are the training's to the bit, or it is told why not."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_parts import (
    WHOLE,
    attached,
    begun,
    check_trained_again,
    clamped,
    nothing,
    planned,
    records,
    small,
    state_of,
    traced,
)
from trainings_to_resume import TRAININGS, Make, Run, simple

import checkflow
from checkflow.graph import Graph
from checkflow.plan.rebuilt import for_replica
from checkflow.schedule import Schedule
from checkflow.store.both.beside import Beside
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.trainer.replica_process import QUIET_DEATHS, ReplicaProcess
from checkflow.torch_internals import unhooked_step

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
EACH = [name for name in TRAININGS if name != "lbfgs"]
SOME = ("adamw foreach", "sgd", "channels_last", "scaler", "several", "tied")
ITERATIONS = 9
WAITS_S = 60.0


def replicated(graph: Graph, *, factors: bool = False) -> Schedule:
    """As a whole where no gradient rebuilds any of the state."""
    return planned(graph, lambda whole: for_replica(whole, graph, factors=factors) or whole, "lowdiff_plus")


def replica_of(ckpt: checkflow.Checkpointer) -> ReplicaProcess:
    found = ckpt._handle._saver.replica
    assert found is not None
    return found


def trained(
    make: Make,
    schedule: Schedule,
    store: Path,
    meanwhile: Callable[[checkflow.Checkpointer, int], None] = lambda _, __: None,
    *,
    approximate: bool = False,
) -> tuple[dict[int, list[object]], list[str], int]:
    """The state after each iteration, what was told, and of which iteration the last one was that was read at once."""
    told: list[str] = []
    run = begun(make)
    with attached(run, schedule, store, told.append, approximate=approximate) as ckpt:
        assert ckpt.restore() == 0
        expected = {}
        for iteration in range(1, ITERATIONS + 1):
            next(run.steps)
            expected[iteration] = state_of(run)
            try:
                ckpt.step()
            except checkflow.StoreError as error:
                told.append(f"error: {error}")
            meanwhile(ckpt, iteration)
        base = ckpt._engine.executor.pipeline.base
    return expected, told, base


def check_each(make: Make, schedule: Schedule, store: Path, expected: dict[int, list[object]]) -> None:
    """What is on disk brings back its iteration, in the order of these, and is a whole checkpoint like any other."""
    found = records(store)
    by_serial = [int(path.name.rpartition("-")[2]) for path in sorted(store.glob("*-iteration-*"))]
    assert by_serial == sorted(by_serial)
    run = begun(make)
    with attached(run, schedule, store, lambda _: None) as ckpt:
        for iteration in sorted(found)[-5:]:
            assert not {"replay", "lanes", "proof"} & found[iteration].keys()
            for parameter in run.training.models[0].parameters():
                with torch.no_grad():
                    parameter.add_(1)
            assert ckpt.restore(iteration) == iteration
            assert state_of(run) == expected[iteration], f"iteration {iteration} differs"


@pytest.mark.parametrize("name", EACH if NIGHTLY else SOME)
def test_what_it_becomes_is_what_training_has(name: str, tmp_path: Path) -> None:
    """Each optimizer, scheduler, accumulation, scaler; two optimizers, of which one makes an update now and then."""
    make = TRAININGS[name]
    schedule = replicated(traced(make))
    assert schedule.replica == (name not in WHOLE)
    expected, told, base = trained(make, schedule, tmp_path / "store")
    if schedule.replica:
        assert base == 1 and not told
    assert max(records(tmp_path / "store")) == ITERATIONS
    check_each(make, schedule, tmp_path / "store", expected)


def test_it_makes_the_products_of_factors(tmp_path: Path) -> None:
    """With as many threads as training, so of the same bits."""

    make = TRAININGS["adamw foreach"]
    schedule = replicated(traced(make), factors=True)
    assert any(row.factor_rows for row in schedule.gradients)
    expected, told, base = trained(make, schedule, tmp_path / "store")
    assert base == 1 and not told
    check_each(make, schedule, tmp_path / "store", expected)


def test_what_an_update_does_not_make_is_read_as_a_whole(tmp_path: Path) -> None:
    """It was not so when it was traced: told once, with how often, and no checkpoint is wrong."""
    schedule = replicated(traced(small(nothing)))
    expected, told, _ = trained(small(clamped), schedule, tmp_path / "store")
    (line,) = told
    assert line.startswith("the host makes no updates beside the training: ")
    assert "is written by something else than its optimizer's update; each is read as a whole" in line
    check_each(small(clamped), schedule, tmp_path / "store", expected)


def test_killed_it_is_started_again_and_goes_on(tmp_path: Path) -> None:
    """Whatever it was doing: what it was making is nobody's, and what it had made is there."""

    def kill(ckpt: checkflow.Checkpointer, iteration: int) -> None:
        if iteration in (2, 3, 6):
            os.kill(replica_of(ckpt).pid, signal.SIGKILL)

    make = TRAININGS["adamw foreach"]
    schedule = replicated(traced(make))
    expected, told, _ = trained(make, schedule, tmp_path / "store", kill)
    assert not told
    assert max(records(tmp_path / "store")) == ITERATIONS
    check_each(make, schedule, tmp_path / "store", expected)


def test_killed_again_and_again_it_is_given_up(tmp_path: Path) -> None:
    """That is told, and from then on each checkpoint is read as a whole."""
    deaths = 0

    def kill(ckpt: checkflow.Checkpointer, iteration: int) -> None:
        nonlocal deaths
        replica, deadline = replica_of(ckpt), time.monotonic() + WAITS_S
        while iteration == 1 and not replica.lost and time.monotonic() < deadline:
            os.kill(replica.pid, signal.SIGKILL)
            assert replica._process.wait(WAITS_S)
            deaths += 1
            ckpt._handle.poll()

    make = TRAININGS["sgd"]
    schedule = replicated(traced(make))
    expected, told, _ = trained(make, schedule, tmp_path / "store", kill)
    assert deaths == QUIET_DEATHS
    (line,) = told
    assert "the host makes no updates beside the training: its process died 3 times in a row (last: signal 9)" in line
    assert max(records(tmp_path / "store")) == ITERATIONS
    check_each(make, schedule, tmp_path / "store", expected)


def test_what_it_makes_otherwise_than_training_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held to the state of the first iteration that it makes: the promise is another one here."""

    monkeypatch.setattr("checkflow.checkpointing.replicated.digest", lambda _: "00")

    def wait(ckpt: checkflow.Checkpointer, iteration: int) -> None:
        deadline = time.monotonic() + WAITS_S
        while iteration == 2 and not replica_of(ckpt).lost and time.monotonic() < deadline:
            time.sleep(0.01)
            ckpt._handle._saver.tend()

    make = TRAININGS["sgd"]
    schedule = replicated(traced(make))
    expected, told, _ = trained(make, schedule, tmp_path / "store", wait)
    assert len(told) == 2 and all("its updates are not those of the training, to the bit" in line for line in told)
    assert sum(line.startswith("error: ") for line in told) == 1
    assert 2 not in records(tmp_path / "store") and max(records(tmp_path / "store")) == ITERATIONS
    check_each(make, schedule, tmp_path / "store", expected)


@pytest.mark.parametrize("back", [1, 3])
def test_what_is_trained_again_is_made_again_from_what_came_back(back: int, tmp_path: Path) -> None:
    """After a restore in the middle of a run, as of any other schedule."""
    make = TRAININGS["adamw foreach"]
    check_trained_again(make, replicated(traced(make)), back, tmp_path)


@pytest.mark.parametrize("slots", [2, 3])
def test_what_it_makes_otherwise_is_found_by_default_too(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where deltas are given up while it starts, a later one has the promise; and training goes on with every slot."""
    monkeypatch.setattr("checkflow.checkpointing.replicated.digest", lambda _: "00")
    make, told = TRAININGS["sgd"], list[str]()
    run, schedule = begun(make), replicated(traced(make))
    with by_default(run, schedule, tmp_path / "store", told, slots=slots) as ckpt:
        ckpt.restore()
        iteration, deadline = 0, time.monotonic() + WAITS_S
        while not replica_of(ckpt).lost and time.monotonic() < deadline:
            iteration += 1
            next(run.steps)
            ckpt.step()
            ckpt._handle.poll()
        assert "not those of the training" in replica_of(ckpt).lost
        for _ in range(12):
            next(run.steps)
            ckpt.step()
            time.sleep(0.01)
        assert ckpt.status().staged_iteration in (iteration + 11, iteration + 12)
        expected = state_of(run)
    assert any("the host makes no updates beside the training: its updates are not those" in line for line in told)
    again = begun(make)
    with by_default(again, schedule, tmp_path / "store", told, slots=slots) as ckpt:
        assert ckpt.restore() == iteration + 12
    assert state_of(again) == expected


def by_default(run: Run, schedule: Schedule, store: Path, told: list[str], *, slots: int = 3) -> checkflow.Checkpointer:
    """Checkpoints are skipped where no slot is free, and what goes wrong is told."""
    return checkflow.attach(
        run.training.model,
        run.training.optimizer,
        schedule=schedule,
        store=store,
        slots=slots,
        on_error="warn",
        notify=told.append,
        tell=lambda _: None,
    )


def test_one_that_always_dies_is_given_up_by_default_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training reads by itself meanwhile is no step of it."""

    def dies(_: SharedMemory) -> tuple[Beside, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        return Beside(subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])), ours

    monkeypatch.setattr("checkflow.store.trainer.replica_process.start_replica", dies)
    make, told = TRAININGS["sgd"], list[str]()
    run, schedule = begun(make), replicated(traced(make))
    with by_default(run, schedule, tmp_path / "store", told) as ckpt:
        ckpt.restore()
        deadline = time.monotonic() + WAITS_S
        while not replica_of(ckpt).lost and time.monotonic() < deadline:
            next(run.steps)
            ckpt.step()
            ckpt._handle.poll()
            time.sleep(0.01)
        assert replica_of(ckpt).lost.startswith("its process died 3 times in a row (last: exit code 1)")
        next(run.steps)
        ckpt.step()
        expected = state_of(run)
    again = begun(make)
    with by_default(again, schedule, tmp_path / "store", told) as ckpt:
        ckpt.restore()
    assert state_of(again) == expected


def test_killed_before_the_end_it_is_waited_for(tmp_path: Path) -> None:
    """Another one is started, and the saver sees what that makes; nothing is told of disks that hang."""
    make, told = TRAININGS["sgd"], list[str]()
    run, schedule = begun(make), replicated(traced(make))
    with by_default(run, schedule, tmp_path / "store", told) as ckpt:
        ckpt.restore()
        deadline = time.monotonic() + WAITS_S
        while ckpt._handle.shared.steps < 3 and time.monotonic() < deadline:
            next(run.steps)
            ckpt.step()
            time.sleep(0.02)
        assert ckpt._handle.shared.steps >= 3 and ckpt._handle.shared.confirmed
        os.kill(replica_of(ckpt).pid, signal.SIGKILL)
        next(run.steps)
        ckpt.step()
        expected = state_of(run)
    assert not told
    again = begun(make)
    with by_default(again, schedule, tmp_path / "store", told) as ckpt:
        ckpt.restore()
    assert state_of(again) == expected


def test_writes_that_no_counter_tells_of_are_found_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next digest, which here is each iteration's."""
    monkeypatch.setattr("checkflow.runtime.replicated.TOLD_S", 0.0)
    monkeypatch.setattr("checkflow.runtime.sampled._TENSORS", 0)  # as where a few bytes do not show it

    def hidden(net: torch.nn.Module, _optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if iteration >= 5:
            for parameter in net.parameters():
                parameter.data.clamp_(-0.02, 0.02)

    schedule = replicated(traced(small(nothing)))
    expected, told, _ = trained(small(hidden), schedule, tmp_path / "store")
    assert any("not those of the training, to the bit" in line for line in told)
    check_each(small(hidden), schedule, tmp_path / "store", expected)


def by_an_ulp(optimizer: torch.optim.Optimizer) -> None:
    """Another device's rounding of one number."""
    unhooked_step(optimizer)
    with torch.no_grad():
        number = optimizer.param_groups[-1]["params"][-1].view(-1)[:1]
        number.copy_(torch.nextafter(number, torch.full_like(number, math.inf)))


def by_a_lot(optimizer: torch.optim.Optimizer) -> None:
    unhooked_step(optimizer)
    with torch.no_grad():
        optimizer.param_groups[-1]["params"][-1].view(-1)[0] += 1e-3


@pytest.mark.parametrize(
    ("other", "approximate", "line"),
    [
        (
            by_an_ulp,
            False,
            r"updates .* is not the same, to the bit, when they are made here \(.*e-0\d off; approximate=",
        ),
        (by_an_ulp, True, r"checkpoints are approximate: the host's first update is .*e-0\d off"),
        (by_a_lot, True, r"is not the same, to the bit, when they are made here; each is read as a whole"),
    ],
)
def test_what_differs_in_the_last_bits_is_taken_where_asked_for(
    other: Callable[[torch.optim.Optimizer], None],
    approximate: bool,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told how far, and so in each checkpoint until one is read again; and told by whoever restores one."""
    monkeypatch.setattr("checkflow.state.restore.replay.unhooked_step", other)
    make = TRAININGS["adamw foreach"]
    schedule = replicated(traced(make))
    expected, told, base = trained(make, schedule, tmp_path / "store", approximate=approximate)
    (found,) = told
    assert re.search(line, found), found
    about = {iteration: record.get("approximate") for iteration, record in records(tmp_path / "store").items()}
    takes = approximate and other is by_an_ulp
    assert (base == 1) == takes
    for iteration, said in about.items():
        assert (said is not None) == (takes and iteration > base)
        if isinstance(said, dict):
            assert said["updates"] == iteration - base and 0 < said["each"] < 1e-6
    said_again: list[str] = []
    run = begun(make)
    with attached(run, schedule, tmp_path / "store", said_again.append) as ckpt:
        assert ckpt.restore() == ITERATIONS
    assert state_of(run) == expected[ITERATIONS]
    assert any("is approximate: the host made its last 8 updates" in each for each in said_again) == takes


def test_approximate_is_for_a_replica_alone(tmp_path: Path) -> None:
    run = begun(TRAININGS["sgd"])
    for policy in (None, "rolling"):
        with pytest.raises(checkflow.InputError, match="approximate: is for updates that the host makes") as error:
            checkflow.attach(
                run.training.model, run.training.optimizer, store=tmp_path / "s", policy=policy, approximate=True
            )
        assert "\n" not in str(error.value) and not (tmp_path / "s").exists()


def test_records_that_outgrow_their_slots_are_whole(tmp_path: Path) -> None:
    """Both processes make room for them in one memory: each iteration's is more, up to some megabytes."""
    make, metadata = TRAININGS["sgd"], dict[str, object]()
    run, schedule = begun(make), replicated(traced(make))
    with checkflow.attach(
        run.training.model,
        run.training.optimizer,
        schedule=schedule,
        store=tmp_path / "store",
        metadata=metadata,
        when_full="wait",
        persist_every=checkflow.PersistEvery(iterations=1),
        retention=checkflow.Retention(last=100),
        tell=lambda _: None,
    ) as ckpt:
        ckpt.restore()
        for iteration in range(1, ITERATIONS + 1):
            next(run.steps)
            metadata["history"] = "x" * 5**iteration
            ckpt.step()
        assert ckpt._engine.executor.pipeline.base == 1
    for iteration, record in records(tmp_path / "store").items():
        assert record["metadata"] == {"history": "x" * 5**iteration}


class Own(torch.optim.SGD):
    """Not torch's."""


def test_an_optimizer_that_only_the_training_has_is_told(tmp_path: Path) -> None:
    """The process could not make one."""

    def make() -> Run:
        return simple(lambda p: Own(p, lr=0.05, momentum=0.9))

    schedule = replicated(traced(make))
    expected, told, _ = trained(make, schedule, tmp_path / "store")
    (line,) = told
    assert "updates of Own are none of torch's own" in line
    check_each(make, schedule, tmp_path / "store", expected)
