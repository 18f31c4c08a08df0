"""What a run tells: in order, on the training's thread, and at no checkpoint's cost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attach import EVERY, compiled, small, train

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.errors import InputError, StoreError
from checkflow.runtime.counters import Cause
from checkflow.schedule import Schedule
from checkflow.store.format.reader import list_checkpoints
from checkflow.training import Training

HOUR_NS = 3600 * 10**9


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return compiled(small)


def attached(training: Training, schedule: Schedule, store: Path, **options: Any) -> Checkpointer:
    given: dict[str, Any] = {"when_full": "wait", "persist_every": EVERY, "tell": lambda _: None} | options
    return checkflow.attach(training.model, training.optimizer, schedule=schedule, store=store, **given)


def test_each_checkpoint_is_told_from_staged_to_verified(schedule: Schedule, tmp_path: Path) -> None:
    """In this order for each iteration, on this thread, and a resume as what it is."""
    told: list[checkflow.Event] = []
    threads: set[threading.Thread] = set()

    def on_event(event: checkflow.Event) -> None:
        threads.add(threading.current_thread())
        told.append(event)

    with attached(small(), schedule, tmp_path / "store", on_event=on_event) as ckpt:
        training = ckpt._training
        train(training, ckpt, 3)
        ckpt.save()
    for iteration in (1, 2, 3):
        kinds = [type(event) for event in told if event.iteration == iteration]
        assert kinds.index(checkflow.Staged) < kinds.index(checkflow.Durable)
    assert told[-1] == next(event for event in reversed(told) if isinstance(event, checkflow.Verified))
    assert told[-1].iteration == 3 and threads == {threading.main_thread()}
    told.clear()
    with attached(small(), schedule, tmp_path / "store", on_event=on_event) as ckpt:
        ckpt.restore()
        (resumed,) = told
        assert isinstance(resumed, checkflow.Resumed)
        assert (resumed.iteration, resumed.checkpoint) == (3, list_checkpoints(tmp_path / "store")[0].path.name)
        assert resumed.metrics["checkflow/resumed"] == 1


def test_events_are_lines_of_the_log(schedule: Schedule, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Staged and durable at DEBUG, a resume at INFO."""
    with caplog.at_level(logging.DEBUG, "checkflow"):
        with attached(small(), schedule, tmp_path / "store") as ckpt:
            train(ckpt._training, ckpt, 2)
        with attached(small(), schedule, tmp_path / "store") as ckpt:
            ckpt.restore()
    lines = {record.getMessage(): record.levelno for record in caplog.records}
    assert lines[f"{tmp_path / 'store'}: iteration 1 is staged"] == logging.DEBUG
    assert any("iteration 2 is durable, " in line and lines[line] == logging.DEBUG for line in lines)
    (resumed,) = [line for line in lines if ": resumed iteration 2 from 0000000" in line]
    assert lines[resumed] == logging.INFO and all("\n" not in line for line in lines)


def test_a_callback_that_raises_is_told_once_and_costs_no_checkpoint(schedule: Schedule, tmp_path: Path) -> None:
    calls: list[checkflow.Event] = []

    def broken(event: checkflow.Event) -> None:
        calls.append(event)
        raise ValueError("no such dashboard")

    training = small()
    with attached(training, schedule, tmp_path / "store", on_event=broken) as ckpt:
        raised = 0
        for _ in range(4):
            training.iteration()
            try:
                ckpt.step()
            except InputError as error:
                raised += 1
                assert str(error).startswith("on_event: ") and "broken raised ValueError" in str(error)
                assert isinstance(error.__cause__, ValueError)
        assert raised == 1 and len(calls) == 1
        assert ckpt.stats().discarded == ckpt.stats().skipped == 0
    assert list_checkpoints(tmp_path / "store")[0].iteration == 4


def test_what_goes_wrong_in_the_background_is_an_event_and_one_error(
    schedule: Schedule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each, though the store tells of it and step() raises it."""
    told: list[checkflow.Event] = []
    with attached(small(), schedule, tmp_path / "store", on_event=told.append) as ckpt:
        train(ckpt._training, ckpt, 1)
        ckpt._handle._saver.fail("the disk is on fire; fetch water")
        ckpt._executor._sink._next_poll_s = 0.0  # type: ignore[attr-defined]
        ckpt._training.iteration()
        with pytest.raises(StoreError, match="fetch water"):
            ckpt.step()
        failed = [event for event in told if isinstance(event, checkflow.Failed)]
        assert [event.message for event in failed] == ["the disk is on fire; fetch water"]
    assert [record.levelno for record in caplog.records if "fetch water" in record.message] == [logging.ERROR]


def test_an_iteration_without_a_checkpoint_says_why(schedule: Schedule, tmp_path: Path) -> None:
    """No slot was free; or the user's own code could not be read."""
    told: list[checkflow.Event] = []
    scheduler = _Unreadable()
    with attached(
        small(), schedule, tmp_path / "store", on_event=told.append, scheduler=scheduler, when_full="skip"
    ) as ckpt:
        train(ckpt._training, ckpt, 1)
        scheduler.problem = ValueError("not now")
        ckpt._training.iteration()
        with pytest.raises(ValueError, match="not now"):
            ckpt.step()
        scheduler.problem = None
        held = [ckpt._handle.acquire() for _ in range(3)]
        ckpt._executor.pipeline._spares.clear()
        ckpt._training.iteration()
        ckpt.step()
        for slot in held:
            if slot is not None:
                ckpt._handle.abandon(slot)
    skipped = {event.iteration: event.reason for event in told if isinstance(event, checkflow.Skipped)}
    assert skipped == {2: "the host's state could not be read", 3: "no slot was free"}


class _Unreadable:
    problem: Exception | None = None

    def state_dict(self) -> dict[str, object]:
        if self.problem is not None:
            raise self.problem
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        pass


def test_a_stall_names_its_causes(schedule: Schedule, tmp_path: Path) -> None:
    """A millisecond and more, of this iteration alone."""
    told: list[checkflow.Event] = []
    with attached(small(), schedule, tmp_path / "store", on_event=told.append) as ckpt:
        train(ckpt._training, ckpt, 1)
        for waited in (1, 0, 2):  # hours, which no busy machine makes us wait
            told.clear()
            ckpt._engine.counters.stalled(Cause.SLOT, waited * HOUR_NS)
            ckpt._training.iteration()
            ckpt.step()
            stalls = [event for event in told if isinstance(event, checkflow.Stalled)]
            assert sum(event.stall_ns for event in stalls) // HOUR_NS == waited
            assert sum(event.ns_by_cause.get(str(Cause.SLOT), 0) for event in stalls) // HOUR_NS == waited


@pytest.mark.parametrize("call", ["step", "save", "restore", "close"])
def test_a_callback_may_look_at_the_checkpointer_but_not_drive_it(
    schedule: Schedule, tmp_path: Path, call: str
) -> None:
    """It is called inside one of these: another one would have to end first. What it catches itself costs nothing."""
    told: list[checkflow.Event] = []
    refused: list[str] = []

    def on_event(event: checkflow.Event) -> None:
        told.append(event)
        assert ckpt.status().staged and ckpt.stats()
        try:
            getattr(ckpt, call)()
        except InputError as error:
            refused.append(str(error))

    with attached(small(), schedule, tmp_path / "store", on_event=on_event) as ckpt:
        train(ckpt._training, ckpt, 3)
    assert len(refused) == len(told) > 0 or (call == "close" and refused)  # in close() another one has nothing to do
    assert set(refused) == {f"{call}: on_event called it, inside another call; do that in the training loop"}
    assert list_checkpoints(tmp_path / "store")[0].iteration == 3


def test_a_forked_child_tells_nothing(schedule: Schedule, tmp_path: Path) -> None:
    """What waits to be told there is its parent's."""
    told: list[checkflow.Event] = []
    with attached(small(), schedule, tmp_path / "store", on_event=told.append, notify=lambda _: None) as ckpt:
        train(ckpt._training, ckpt, 2)
        ckpt._engine.events.append(checkflow.Staged(7))
        before = len(told)
        child = os.fork()
        if not child:
            ckpt.step()
            os._exit(len(told) - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(told) == before
        ckpt._training.iteration()
        ckpt.step()
    assert checkflow.Staged(7) in told


def test_no_event_is_told_inside_a_hook(schedule: Schedule, tmp_path: Path) -> None:
    """What hooks cause, as a checkpoint that is given up in the backward pass, waits for step()."""
    told: list[checkflow.Event] = []
    training = small()
    with attached(training, schedule, tmp_path / "store", on_event=told.append) as ckpt:
        given_up = checkflow.Skipped(1, "given up in a hook")
        pipeline = ckpt._executor.pipeline
        hook = training.models[0].register_forward_pre_hook(lambda *_: pipeline._note(given_up))
        training.iteration()
        hook.remove()
        assert given_up not in told
        ckpt.step()
        assert told.count(given_up) == 1


@pytest.mark.parametrize("wrong", ["print", 3])
def test_on_event_has_to_be_a_function(schedule: Schedule, tmp_path: Path, wrong: Callable[..., object]) -> None:
    with pytest.raises(InputError, match=r"^on_event: a (str|int) cannot be called; give a function"):
        attached(small(), schedule, tmp_path / "store", on_event=wrong)


def test_a_tensor_s_device_does_not_matter() -> None:
    """Events are plain values: equal by content, and frozen."""
    assert checkflow.Staged(3) == checkflow.Staged(3)
    with pytest.raises(AttributeError):
        checkflow.Staged(3).iteration = 4  # type: ignore[misc]
    assert torch.tensor(checkflow.Durable(3, 10, 10**9).metrics["checkflow/write_seconds"]).item() == 1
