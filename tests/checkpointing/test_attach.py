"""attach, step, save, restore and close, with a real schedule, a real store and its saver process."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import Program
from safetensors import safe_open
from torch import nn

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import DeviceError, InputError, StoreError
from checkflow.schedule import Schedule, write_schedule
from checkflow.store.format.reader import Checkpoint, list_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

EVERY = PersistEvery(iterations=1)


def small() -> Training:
    """One layer of each kind, on a fixed batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, iteration)


def compiled(factory: Callable[[], Training], interval: int = 1) -> Schedule:
    """Traced with measured times and compiled, as a user would."""
    graph = trace_training(factory, model="small", measure=True).graph
    answer = compile_graph(graph, Options(bandwidth_bytes_per_s=10**9, interval=interval))
    assert isinstance(answer, Compiled)
    return answer.schedule


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return compiled(small)


def attached(training: Training, schedule: Schedule | Path, store: Path, **options: Any) -> Checkpointer:
    """Each iteration has a checkpoint, and each of those is made durable."""
    given: dict[str, Any] = {"when_full": "wait", "persist_every": EVERY} | options
    return checkflow.attach(training.model, training.optimizer, schedule=schedule, store=store, **given)


def weights(training: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in training.models[0].state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def train(training: Training, ckpt: Checkpointer, iterations: int) -> None:
    for _ in range(ckpt.restore(), iterations):
        training.iteration()
        ckpt.step()


def test_a_resumed_run_ends_as_one_that_was_never_interrupted(schedule: Schedule, tmp_path: Path) -> None:
    """Weights, moments, running statistics and dropout's random numbers."""
    whole = small()
    with attached(whole, schedule, tmp_path / "whole") as ckpt:
        assert ckpt.restore() == 0
        train(whole, ckpt, 12)
    first = small()
    with attached(first, schedule, tmp_path / "parts") as ckpt:
        train(first, ckpt, 5)
    second = small()
    torch.manual_seed(1234)
    with attached(second, schedule, tmp_path / "parts") as ckpt:
        assert ckpt.restore() == 5
        train(second, ckpt, 12)
    assert same(weights(whole), weights(second))
    newest = list_checkpoints(tmp_path / "parts")[0]
    assert newest.iteration == 12


def test_checkpointing_does_not_change_the_training(schedule: Schedule, tmp_path: Path) -> None:
    """Bit for bit as without it."""
    plain, saved = small(), small()
    with attached(saved, schedule, tmp_path / "store") as ckpt:
        torch.manual_seed(5)
        train(saved, ckpt, 6)
    torch.manual_seed(5)
    for _ in range(6):
        plain.iteration()
    assert same(weights(plain), weights(saved))


def test_the_files_are_plain_safetensors(schedule: Schedule, tmp_path: Path) -> None:
    """Named as state_dict names them, and as <parameter>.<slot>."""
    training = small()
    write_schedule(tmp_path / "schedule.json", schedule)
    with attached(training, tmp_path / "schedule.json", tmp_path / "store") as ckpt:
        train(training, ckpt, 3)
    newest = list_checkpoints(tmp_path / "store")[0]
    assert isinstance(newest, Checkpoint)
    assert newest.iteration == 3
    with safe_open(newest.path / "model.safetensors", "pt") as file:
        assert same({name: file.get_tensor(name) for name in file.keys()}, weights(training))  # noqa: SIM118
    with safe_open(newest.path / "optimizer.safetensors", "pt") as file:
        assert "0.weight.exp_avg" in file.keys()  # noqa: SIM118


def test_save_is_durable_and_retained_when_it_returns(schedule: Schedule, tmp_path: Path) -> None:
    """Later checkpoints do not prune it."""
    training = small()
    with attached(training, schedule, tmp_path / "store") as ckpt:
        train(training, ckpt, 2)
        ckpt.save()
        found = [c.iteration for c in list_checkpoints(tmp_path / "store") if isinstance(c, Checkpoint)]
        assert 2 in found
        train_more(training, ckpt, 6)
    kept = [c.iteration for c in list_checkpoints(tmp_path / "store") if isinstance(c, Checkpoint)]
    assert 2 in kept
    assert max(kept) == 8


def train_more(training: Training, ckpt: Checkpointer, iterations: int) -> None:
    for _ in range(iterations):
        training.iteration()
        ckpt.step()


@pytest.mark.parametrize("slots", [1, 2])
def test_save_finds_a_slot_with_few_slots_and_skip(tmp_path: Path, slots: int) -> None:
    """Where none is free it waits for the saver, whatever when_full says of iterations."""
    schedule = compiled(small, interval=3)
    training = small()
    with checkflow.attach(
        training.model,
        training.optimizer,
        schedule=schedule,
        store=tmp_path / "store",
        slots=slots,
        persist_every=EVERY,
    ) as ckpt:
        for _ in range(5):
            training.iteration()
            ckpt.step()
            ckpt.save(keep=False)
        assert ckpt.stats().staged >= 5
    assert ckpt.status().durable_iteration == 5


def test_a_run_restores_from_its_own_store_wherever_that_was_moved(schedule: Schedule, tmp_path: Path) -> None:
    """Another run has the path since."""
    training, store = small(), tmp_path / "store"
    with attached(training, schedule, store) as ckpt:
        train(training, ckpt, 2)
        ckpt.save()
        saved = weights(training)
        with pytest.warns(UserWarning, match=f"was moved to {tmp_path / 'old'}"):
            store.rename(tmp_path / "old")
            other = small()
            with attached(other, schedule, store) as second:
                train(other, second, 7)
            assert ckpt.restore() == 2
            assert same(weights(training), saved)
            training.iteration()
            ckpt.step()
            ckpt.close()
    assert list_checkpoints(store)[0].iteration == 7
    assert list_checkpoints(tmp_path / "old")[0].iteration == 3


def test_what_was_restored_can_be_saved_to_keep(tmp_path: Path) -> None:
    """Also an older one than the newest: it is the restored state that is kept. Closing does not save it again."""
    schedule = compiled(small, interval=1)
    training = small()
    with attached(training, schedule, tmp_path) as ckpt:
        for _ in range(3):
            train_more(training, ckpt, 1)
            ckpt.save(keep=True)
    training, before = small(), list_checkpoints(tmp_path)
    with attached(training, schedule, tmp_path) as ckpt:
        assert ckpt.restore(2) == 2
    assert list_checkpoints(tmp_path) == before
    with attached(training, schedule, tmp_path) as ckpt:
        assert ckpt.restore(2) == 2
        ckpt.save(keep=True)
    newest = list_checkpoints(tmp_path)[0]
    assert isinstance(newest, Checkpoint) and newest.iteration == 2 and newest.manifest.keep


def test_a_single_slot_persists_each_before_the_next_is_begun(tmp_path: Path) -> None:
    """Whatever persist_every says; so a lost machine costs the iteration that runs and the one being written."""
    schedule = compiled(small, interval=1)
    training = small()
    with checkflow.attach(
        training.model, training.optimizer, schedule=schedule, store=tmp_path, slots=1, when_full="wait",
        retention=Retention(last=99),
    ) as ckpt:  # fmt: skip
        for iteration in range(1, 9):
            train_more(training, ckpt, 1)
            assert max((found.iteration for found in list_checkpoints(tmp_path)), default=0) >= iteration - 1
    assert [found.iteration for found in list_checkpoints(tmp_path)] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_nothing_is_asked_of_what_is_closed(tmp_path: Path) -> None:
    training = small()
    ckpt = checkflow.attach(training.model, training.optimizer, store=tmp_path)
    ckpt.close()
    calls: dict[str, Callable[[], object]] = {"step": ckpt.step, "save": ckpt.save, "restore": ckpt.restore}
    for name, call in calls.items():
        with pytest.raises(InputError, match=f"^{name}: is closed; attach again$"):
            call()


def test_closing_saves_the_last_iteration_at_any_interval(tmp_path: Path) -> None:
    """Unless the loop failed: then the newest that was due is what a resume gets, and that is told."""
    schedule = compiled(small, interval=3)
    for failing, durable in ((False, 5), (True, 3)):
        training, store = small(), tmp_path / str(failing)
        told: list[str] = []
        with (
            contextlib.suppress(ZeroDivisionError),
            attached(training, schedule, store, notify=told.append) as ckpt,
        ):
            train_more(training, ckpt, 5)
            if failing:
                raise ZeroDivisionError
        assert ckpt.status().durable_iteration == durable
        assert ["iterations 4 to 5 are in no checkpoint" in line for line in told] == [True] * failing


def test_an_error_in_the_loop_propagates_and_the_last_iteration_is_durable(schedule: Schedule, tmp_path: Path) -> None:
    """In the middle of the next iteration."""
    training = small()
    with pytest.raises(ZeroDivisionError), attached(training, schedule, tmp_path / "store") as ckpt:
        train(training, ckpt, 4)
        training.models[0](torch.zeros(2, 6))
        raise ZeroDivisionError
    again = small()
    with attached(again, schedule, tmp_path / "store") as ckpt:
        assert ckpt.restore() == 4


def test_statistics_and_the_closing_line(schedule: Schedule, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Predicted beside measured; one line at close."""
    training = small()
    with caplog.at_level(logging.INFO, logger="checkflow"), attached(training, schedule, tmp_path / "s") as ckpt:
        train(training, ckpt, 5)
        stats = ckpt.stats()
    assert (stats.iterations, stats.started, stats.skipped, stats.discarded) == (5, 5, 0, 0)
    assert stats.iteration_ns > 0
    assert stats.predicted_iteration_ns == schedule.iteration_time_ns
    assert stats.unwatched == ()
    assert stats.silent_anchors == ()
    assert stats.hook_ns >= stats.last_iteration_stall_ns >= 0
    assert ckpt.stats().staged == 5
    assert ckpt.stats().offloaded_bytes == 5 * schedule.state_bytes + stats.static_bytes
    assert len(caplog.messages) == 1
    assert "5 checkpoints staged" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def test_what_is_not_the_schedules_is_refused_before_anything_is_made(schedule: Schedule, tmp_path: Path) -> None:
    """The first difference is named; no store appears, no hook stays."""
    training = small()
    training.models[0].append(nn.Linear(3, 3))  # type: ignore[operator]
    with pytest.raises(InputError, match=r"model/5\.weight: is state of this training, but not in the schedule"):
        attached(training, schedule, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    assert not any(m._forward_pre_hooks for m in training.models[0].modules())


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine"])
def test_models_of_several_processes_are_refused_by_name(name: str, schedule: Schedule, tmp_path: Path) -> None:
    """Until they are supported."""
    training = small()
    training.models[0].__class__ = type(name, (type(training.models[0]),), {})
    with pytest.raises(InputError, match=r"model: (FSDP|DataParallel|DeepSpeed) is not supported yet; use FSDP2"):
        attached(training, schedule, tmp_path / "store")


def test_bad_arguments_are_refused(schedule: Schedule, tmp_path: Path) -> None:
    """By name, in one line."""
    training = small()
    with pytest.raises(InputError, match="interval: 0 is not positive"):
        checkflow.attach(training.model, training.optimizer, schedule=schedule, store=tmp_path / "s", interval=0)
    with pytest.raises(InputError, match="when_full: 'block' is not known"):
        checkflow.attach(
            training.model, training.optimizer, schedule=schedule, store=tmp_path / "s",
            when_full="block",  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(StoreError, match="slots: 0 is not supported"):
        checkflow.attach(training.model, training.optimizer, schedule=schedule, store=tmp_path / "s", slots=0)


WRONG = {
    "store": 3, "bucket": 3, "schedule": 3, "generators": [], "metadata": "run 1", "policy": 1,
    "interval": "2", "overhead": "5%", "slots": 2.5, "persist_every": 3, "retention": 2, "retry_s": "0.1",
    "sigterm_deadline_s": "20", "peers_deadline_s": None, "replicate": "1",
    "tell": None, "notify": "stderr",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_type_is_told_in_a_line(name: str, tmp_path: Path) -> None:
    training = small()
    given: dict[str, Any] = {"store": tmp_path / "store", name: WRONG[name]}
    with pytest.raises(InputError) as refusal:
        checkflow.attach(training.model, training.optimizer, **given)
    said = f"{name}: {WRONG[name]!r} is of type {type(WRONG[name]).__name__}; give "
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)
    assert not (tmp_path / "store").exists()


class _Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __eq__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", [*WRONG, "when_full"])
def test_an_argument_whose_own_code_fails_is_told_likewise(name: str, tmp_path: Path) -> None:
    training = small()
    given: dict[str, Any] = {"store": tmp_path / "store", name: _Silent()}
    with pytest.raises(InputError, match=f"^{name}: a _Silent is "):
        checkflow.attach(training.model, training.optimizer, **given)


def test_numbers_may_be_those_of_numpy(tmp_path: Path) -> None:
    training = small()
    given: dict[str, Any] = {"interval": np.int64(1), "slots": np.int64(2), "tell": lambda _: None}
    with checkflow.attach(training.model, training.optimizer, store=tmp_path / "store", **given) as ckpt:
        training.iteration()
        ckpt.step()
        assert ckpt.status().staged == 1


def test_no_store_and_no_end_of_trying_are_refused(tmp_path: Path) -> None:
    training = small()
    with pytest.raises(InputError, match="store: is empty; give a directory"):
        checkflow.attach(training.model, training.optimizer, store="")
    with pytest.raises(InputError, match="retry_s: inf is no number of seconds; use 0 or more"):
        checkflow.attach(training.model, training.optimizer, store=tmp_path / "store", retry_s=float("inf"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"retry_s": 10**400}, "retry_s: 10+ is out of range; use 0 or more"),
        ({"sigterm_deadline_s": 10**400}, "sigterm_deadline_s: 10+ is out of range; use 0 or more"),
        ({"sigterm_deadline_s": math.inf}, "sigterm_deadline_s: inf is more than 2000000 seconds, 23 days; give less"),
        ({"peers_deadline_s": 10**400}, "peers_deadline_s: 10+ is out of range; use a number of seconds"),
        ({"peers_deadline_s": math.inf}, "peers_deadline_s: inf is more than 2000000 seconds, 23 days; give less"),
        ({"interval": 10**5000}, "interval: .* is out of range; use 1 or more"),
        ({"slots": 10**5000}, "slots: .* is out of range; use 2 or 3"),
        ({"replicate": 10**5000}, "replicate: .* is not supported"),
    ],
)
def test_what_is_more_than_anything_is_refused_in_a_line(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    training = small()
    with pytest.raises(InputError, match=f"^{says}") as caught:
        checkflow.attach(training.model, training.optimizer, store=tmp_path / "store", **given)
    assert len(str(caught.value).splitlines()) == 1


LOST = """
import os, sys, torch, checkflow
attach = checkflow.attach  # torch cannot be imported later
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
def trained(store):
    model = torch.nn.Linear(2, 2)
    with attach(model, torch.optim.SGD(model.parameters()), store=store, tell=lambda _: None) as ckpt:
        ckpt.restore()
        ckpt.step()
try:
    trained("store")
except checkflow.InputError as error:
    print(error)
trained(sys.argv[1])
print("done")
"""


def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose whole path is given needs none."""
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", LOST, tmp_path / "store"], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "store: store: the working directory was removed; change to one that is there", "done",
    ], done.stderr  # fmt: skip


def test_what_attaching_fails_for_is_what_is_told(
    schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not how the saver that was started for it ended."""

    def refuse(*_: object) -> None:
        raise DeviceError("slots: CUDA refuses")

    training = small()
    monkeypatch.setattr("checkflow.runtime.host.HostDevice.register", refuse)
    with pytest.raises(DeviceError, match="CUDA refuses"):
        attached(training, schedule, tmp_path)
    monkeypatch.undo()
    attached(training, schedule, tmp_path).close()


SCRIPT = """
    import signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {here!r})
    from test_attach import attached, small
    training = small()
    {before}
    with attached(training, Path({schedule!r}), Path({store!r})) as ckpt:
        for iteration in range(ckpt.restore(), 10**9):
            training.iteration()
            ckpt.step()
            print(iteration + 1, flush=True)
"""


def _run(tmp_path: Path, schedule: Schedule, before: str = "") -> Program:
    write_schedule(tmp_path / "schedule.json", schedule)
    script = textwrap.dedent(SCRIPT).format(
        here=str(Path(__file__).parent),
        schedule=str(tmp_path / "schedule.json"),
        store=str(tmp_path / "store"),
        before=before,
    )
    return Program(script, stderr=tmp_path / "stderr")


@pytest.mark.parametrize(("number", "lost"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_a_terminated_training_resumes_where_it_was(
    number: signal.Signals, lost: int, schedule: Schedule, tmp_path: Path
) -> None:
    """SIGTERM loses no completed iteration, SIGKILL at most one."""
    process = _run(tmp_path, schedule)
    process.until("20")
    process.send_signal(number)
    code, out = process.end()
    assert code == -number
    completed = int(out.split()[-1]) if out.split() else 20
    training = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may have to wait for the former saver, and says so
        with attached(training, schedule, tmp_path / "store") as ckpt:
            assert ckpt.restore() >= completed - lost


def test_a_containers_first_process_ends_at_sigterm_too(schedule: Schedule, tmp_path: Path) -> None:
    """The kernel drops what such a process sends to itself and does not handle."""
    process = _run(tmp_path, schedule, before="import os; os.kill = lambda *_: None")
    process.until("5")
    process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 143


def test_a_users_own_sigterm_handler_is_called(schedule: Schedule, tmp_path: Path) -> None:
    """After the last iteration was staged."""
    process = _run(tmp_path, schedule, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
    process.until("5")
    process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 7
