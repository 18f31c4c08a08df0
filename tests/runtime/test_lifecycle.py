"""Which checkpoints there are after something unusual: a rollback, a failed restore, an error that was caught."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import small_trainings as trainings
import torch
from torn import Rig, random_schedule, rig

from checkflow.errors import InputError, StoreError
from checkflow.runtime.lifecycle import Inside, Lifecycle, Phase
from checkflow.runtime.sink import NamedSlot
from checkflow.state.live import live_state


def _write(made: Rig, by: float) -> None:
    """As a restore does: in place, and without a guard."""
    with torch.no_grad():
        for live in live_state(made.case.training):
            if live.tensor.is_floating_point():
                live.tensor.add_(by)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lag", [3, 10**9])
def test_what_is_in_flight_is_read_before_a_restore_writes(seed: int, lag: int) -> None:
    """However late the copies are; what was completed is staged, as it was."""
    made = rig(trainings.adamw_foreach, random_schedule(trainings.adamw_foreach, seed, snapshots=0.0), lag=lag)
    made.run(5)
    made.executor.begin_restore()
    _write(made, 0.5)
    made.executor.resume(2)
    assert made.sink.order == [1, 2, 3, 4, 5] and made.torn() == []
    del made.sink.staged[3]
    made.run(1)
    made.close()
    assert made.sink.order == [1, 2, 3, 4, 5, 3]
    assert made.torn() == []


def test_a_restore_in_the_middle_of_an_iteration_begins_it_anew() -> None:
    """Anchors are counted from the beginning again."""
    made = rig(trainings.accumulating, random_schedule(trainings.accumulating, 1), lag=3)
    made.run(2)
    made.case.training.models[0](torch.zeros(4, 6))
    made.executor.begin_restore()
    _write(made, 0.5)
    made.executor.resume(1)
    assert not made.executor.touched
    made.run(3)
    made.close()
    assert made.sink.order == [1, 2, 2, 3, 4]
    assert made.torn() == []


def test_static_state_that_a_restore_wrote_is_copied_again() -> None:
    """Slots hold it from before."""
    made = rig(trainings.frozen, random_schedule(trainings.frozen, 0), lag=0)
    made.run(4)
    made.executor.begin_restore()
    for live in live_state(made.case.training):
        live.tensor.data.numpy()[...] += 1  # no version counter tells
    made.executor.resume(2)
    made.sink.staged.clear()
    made.run(4)
    made.close()
    assert made.torn() == []


def test_no_step_is_taken_until_a_restore_has_ended() -> None:
    """Its state is that of no iteration, and nothing of it is saved."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0), lag=0)
    made.run(3)
    made.executor.begin_restore()
    made.case.iterate(3)
    with pytest.raises(InputError, match=r"step: restore\(\) did not end"):
        made.executor.step()
    with pytest.raises(InputError, match=r"save: restore\(\) did not end"):
        made.executor.save()
    assert not made.executor.unsaved
    made.executor.resume(1)
    made.run(1)
    made.close()
    assert made.sink.order == [1, 2, 3, 2]


def test_a_sinks_error_costs_its_checkpoint_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for a slot it tells of something older: the iteration has ended all the same, and the next is saved."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0, snapshots=0.0), lag=0, interval=3)

    def refuse(*_: object) -> None:
        raise StoreError("older")

    made.run(2)
    monkeypatch.setattr(made.sink, "try_acquire", lambda *_: None)
    monkeypatch.setattr(made.sink, "acquire", refuse)
    with pytest.raises(StoreError, match="older"):
        made.run(1)
    monkeypatch.undo()
    assert made.executor.completed == 3 and not made.executor.touched
    assert made.executor.unsaved and made.executor.save()
    made.run(3)
    made.close()
    assert made.sink.order == [3, 6]
    assert made.torn() == []


def test_a_checkpoint_that_cannot_be_staged_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no error in the middle of a forward: the next step() raises it."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0, snapshots=0.0), lag=5, slots=2)
    stage = made.sink.stage

    def refuse(slot: NamedSlot, iteration: int, record: bytes, *, whole: bool) -> None:
        if iteration == 2:
            raise StoreError("too long")
        stage(slot, iteration, record, whole=whole)

    monkeypatch.setattr(made.sink, "stage", refuse)
    made.run(2)
    made.case.iterate(2)
    with pytest.raises(StoreError, match="too long"):
        for _ in range(2):
            made.mark()
    made.run(4)
    made.close()
    assert 2 not in made.sink.order and len(made.sink._free) + len(made.sink._held) == 2
    assert made.torn() == []


def test_after_an_interruption_in_the_middle_nothing_in_flight_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while copies are given to the device; the last iteration is counted, and can still be saved."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0, snapshots=0.0))
    made.run(2)
    calls: list[object] = []

    def interrupted(batch: object) -> None:
        calls.append(batch)
        raise KeyboardInterrupt

    made.case.iterate(2)
    monkeypatch.setattr(made.executor._device, "offload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.mark()
    monkeypatch.undo()
    assert calls
    assert made.executor.lifecycle.phase is Phase.BROKEN
    assert made.executor.completed == 3 and made.executor.unsaved and made.executor.save()
    made.run(2)
    made.close()
    assert made.sink.order[-3:] == [3, 4, 5]
    assert made.torn() == []


def test_the_phases_follow_each_other_as_the_table_says() -> None:
    """After closing there is none."""
    lifecycle = Lifecycle(Phase.IDLE)
    for phase in (Phase.FILLING, Phase.BROKEN, Phase.RESTORING, Phase.FILLING, Phase.IDLE, Phase.CLOSED):
        lifecycle.to(phase)
    with pytest.raises(AssertionError):
        lifecycle.to(Phase.FILLING)


def test_a_closed_executor_refuses_a_step() -> None:
    """In one line."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0))
    made.run(1)
    made.close()
    with pytest.raises(InputError, match="step: is closed; attach again"):
        made.executor.step()


def test_what_has_to_wait_runs_when_the_work_in_progress_ends() -> None:
    """In the same thread or in the one that works; at once where nobody does."""
    inside, ran = Inside(), list[str]()

    def note(what: str) -> Callable[[], None]:
        return lambda: ran.append(what)

    inside.when_left(note("at once"))
    with inside:
        with inside:
            inside.when_left(note("later"))
        assert ran == ["at once"]
    assert ran == ["at once", "later"]
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with inside:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    inside.when_left(note("there"))
    assert len(ran) == 2
    leave.set()
    thread.join()
    assert ran[-1] == "there"


@pytest.mark.parametrize("at", ["depth", "lock"])
def test_what_an_exception_left_of_being_inside_is_let_go_at_the_next_call(at: str) -> None:
    """It came on the way out; nothing of checkflow is on the stack, so that nobody is inside."""
    inside, acted = Inside(), list[str]()
    inside.__enter__()
    if at == "lock":
        inside.depth = 0
    else:
        inside.when_left(lambda: acted.append("SIGTERM"))
    inside.refuse("step")

    def enter() -> None:
        with inside:
            acted.append("entered")

    free = threading.Thread(target=enter, daemon=True)
    free.start()
    free.join(10)
    assert acted == (["entered"] if at == "lock" else ["SIGTERM", "entered"])
