"""attach without a schedule: what is checkpointed until there is one, when it is followed, what makes it learn anew."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_link import copies_take
from torch import nn

import checkflow
from checkflow.background import NICENESS
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.errors import AuditError
from checkflow.graphfile import read_graph
from checkflow.learning import learner
from checkflow.learning.kept import FOLDER
from checkflow.learning.messages import Request
from checkflow.learning.planner import Planner
from checkflow.runtime import follower
from checkflow.runtime.counters import Cause
from checkflow.schedule import Schedule, read_schedule
from checkflow.store.format.reader import list_checkpoints
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace.live import recorded
from checkflow.trace.stopwatch import Stopwatch
from checkflow.verify import verify

LONG_S = 120.0


def net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


class Loop:
    """A training as a script has it; `ckpt.step()` is called from `train`, whose variables are what it can reach."""

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None) -> None:
        self.model = net()
        make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.optimizer = make(list(self.model.parameters()))
        self.rows = 8

    def iterate(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.rows, 6, generator=generator)
        y = torch.randint(3, (self.rows,), generator=generator)
        torch.autograd.backward(F.cross_entropy(self.model(x), y))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        slots = [value for state in self.optimizer.state.values() for _, value in sorted(state.items())]
        return [tensor.clone() for tensor in (*self.model.state_dict().values(), *slots)]


def attached(loop: Loop, store: Path, told: list[str] | None = None, **options: Any) -> Checkpointer:
    told = [] if told is None else told
    given: dict[str, Any] = {"when_full": "wait", "persist_every": PersistEvery(iterations=1), "tell": told.append}
    given |= {"notify": told.append} | options
    return checkflow.attach(loop.model, loop.optimizer, store=store, **given)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def until_learned(ckpt: Checkpointer, iterate: Callable[[int], None], first: int = 0) -> int:
    """Iterations completed when a learned schedule is followed."""
    done, deadline = first, time.monotonic() + LONG_S
    while not ckpt.stats().learned_in:
        assert time.monotonic() < deadline, "no schedule was learned"
        iterate(done)
        ckpt.step()
        done += 1
        time.sleep(0.01)
    return done


def test_each_iteration_has_a_checkpoint_and_a_plan_is_followed_soon(tmp_path: Path) -> None:
    """Also the first one, before which the optimizer has no state."""
    loop, told, events = Loop(), list[str](), list[checkflow.Event]()
    with attached(loop, tmp_path / "store", told, on_event=events.append) as ckpt:
        assert ckpt.restore() == 0
        states = {}
        for number in range(3):
            loop.iterate(number)
            ckpt.step()
            ckpt.save()
            states[number + 1] = loop.state()
        done = until_learned(ckpt, loop.iterate, 3)
        loop.iterate(done)
        ckpt.step()
        stats = ckpt.stats()
    assert stats.staged + 1 >= stats.iterations - 1
    assert stats.skipped == 0
    assert any("learned its schedule" in line for line in told), told
    (learned,) = [event for event in events if isinstance(event, checkflow.Learned)]
    certificate = ckpt.schedule.certificate
    assert learned == checkflow.Learned(stats.learned_in, 1, certificate.peak_bytes, certificate.training_peak_bytes)
    staged = [event.iteration for event in events if isinstance(event, checkflow.Staged)]
    assert staged == list(range(1, stats.iterations + 1)), "a changeover loses none"
    for iteration, state in states.items():
        other = Loop()
        with attached(other, tmp_path / "store") as ckpt:
            assert ckpt.restore(iteration) == iteration
            assert same(other.state(), state)


def test_it_changes_nothing_and_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Interrupted before a plan is there, and after."""
    torch.manual_seed(7)
    plain = Loop()
    torch.manual_seed(7)
    for number in range(80):
        plain.iterate(number)
    whole = Loop()
    torch.manual_seed(7)
    learned = 0
    for stop in (2, 5, 60, 80):
        loop = Loop()
        with attached(loop, tmp_path / "store") as ckpt:
            first = ckpt.restore()
            if first == 0:
                torch.manual_seed(7)
            for number in range(first, stop):
                while number >= 10 and ckpt.learning == "planning":
                    time.sleep(0.01)
                loop.iterate(number)
                ckpt.step()
            learned = learned or ckpt.stats().learned_in
        whole = loop
    assert learned
    assert same(plain.state(), whole.state())


def test_what_was_learned_is_kept_and_used_at_once(tmp_path: Path) -> None:
    """Closing waits until it is. It verifies against the kept graph; another training does not take it."""
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        done = until_learned(ckpt, loop.iterate)
    (kept,) = (tmp_path / "store" / FOLDER).glob("*.schedule.json")
    graph = kept.with_name(kept.name.replace("schedule", "graph"))
    verify(read_schedule(kept), read_graph(graph))
    again, told = Loop(), list[str]()
    with attached(again, tmp_path / "store", told) as ckpt:
        assert ckpt.restore() == done
        again.iterate(done)
        ckpt.step()
        assert ckpt.schedule == read_schedule(kept)
    assert not any("learns its schedule" in line for line in told), told
    other, told = Loop(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), []
    with attached(other, tmp_path / "other", told):
        assert any("learns its schedule" in line for line in told)


def test_a_kept_schedule_that_is_damaged_is_learned_anew(tmp_path: Path) -> None:
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        place = ckpt._adapting._learner._place  # type: ignore[union-attr]
    place.parent.mkdir(exist_ok=True)
    place.with_suffix(".schedule.json").write_text("{")
    told: list[str] = []
    with attached(loop, tmp_path / "store", told) as ckpt:
        assert any("learning anew" in line and "is not JSON" in line for line in told), told
        until_learned(ckpt, loop.iterate)


@pytest.mark.parametrize("policy", ["checkflow", "rolling", "lowdiff"])
def test_what_is_listed_since_a_schedule_was_learned_is_learned(policy: str, tmp_path: Path) -> None:
    """Once: of a schedule that knows all that is listed nothing is learned again."""
    average, loss = torch.optim.swa_utils.AveragedModel(Loop().model), torch.zeros(())
    extra = {"average": average, "seen": {"rows": torch.zeros(300, 2), "none": torch.zeros(0)}, "loss": loss}
    extra |= {"recent": deque([torch.zeros(9)]), "lists": [torch.zeros(9)], "count": {"of": 3}}
    known = []
    for listed in ({}, extra, extra):
        loop, told = Loop(), list[str]()
        with attached(loop, tmp_path / "store", told, policy=policy, extra=listed) as ckpt:
            done, known_at_once = ckpt.restore(), ckpt.learning == "knowing"
            known.append(known_at_once)
            if not known_at_once:
                until_learned(ckpt, loop.iterate, done)
        assert not any("compile" in line for line in told), told
    assert known == [False, False, True]


def test_what_cannot_be_saved_is_no_reason_to_learn_anew(tmp_path: Path) -> None:
    """It is refused, and the schedule that is kept has nothing to do with it."""
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store") as ckpt:
        until_learned(ckpt, loop.iterate)
    with pytest.raises(checkflow.InputError, match=r"^extra\.held\.f: a function cannot be saved"):
        attached(loop, tmp_path / "store", told, extra={"held": {"f": print}}, start_over=True)
    assert not any("anew" in line for line in told), told
    with attached(loop, tmp_path / "store", told, start_over=True) as ckpt:
        assert ckpt.learning == "knowing"


@pytest.mark.parametrize("policy", ["checkflow", "lowdiff"])
def test_what_checkflow_runs_is_none_of_the_trainings(policy: str, tmp_path: Path) -> None:
    """Its looks at state, when guards fire and when updates have been made, are operators, too."""
    alone = Loop()
    ahead = recorded(checkflow.Training(alone.model, alone.optimizer, lambda: alone.iterate(0)), "alone")
    loop = Loop()
    with attached(loop, tmp_path, policy=policy) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        found = [operators(tmp_path, ckpt.schedule)]
        loop.rows, before, deadline = 5, ckpt.schedule, time.monotonic() + LONG_S
        while ckpt.schedule is before and time.monotonic() < deadline:  # and again, while what was learned is followed
            loop.iterate(done)
            ckpt.step()
            done += 1
            time.sleep(0.01)
        found.append(operators(tmp_path, ckpt.schedule))
    assert found == 2 * [[op.name for op in ahead.ops]]


def operators(store: Path, followed: Schedule) -> list[str]:
    """Of the iteration that `followed` was learned from. It is in force a little before it is kept."""
    deadline = time.monotonic() + LONG_S
    while not any(read_schedule(path) == followed for path in (store / FOLDER).glob("*.schedule.json")):
        assert time.monotonic() < deadline, "what was learned was not kept"
        time.sleep(0.01)
    (graph,) = (store / FOLDER).glob("*.graph.json")
    return [op.name for op in read_graph(graph).ops]


def test_where_a_link_is_what_was_learned_takes_its_place(tmp_path: Path) -> None:
    """It is no more written through than read: wherever it leads, that is somebody else's."""
    loop, theirs = Loop(), tmp_path / "theirs"
    theirs.write_text("their own")
    with attached(loop, tmp_path / "store") as ckpt:
        place = ckpt._adapting._learner._place  # type: ignore[union-attr]
        place.parent.mkdir(exist_ok=True)
        for ending in (".schedule.json", ".graph.json"):
            place.with_suffix(ending).symlink_to(theirs)
        until_learned(ckpt, loop.iterate)
    assert theirs.read_text() == "their own"
    verify(read_schedule(place.with_suffix(".schedule.json")), read_graph(place.with_suffix(".graph.json")))


def test_state_that_appears_later_gets_its_room(tmp_path: Path) -> None:
    """A layer is added to the optimizer: the slots are others, nothing is lost, and it is learned anew."""
    loop, told = Loop(), list[str]()
    late = nn.Linear(16, 3)
    loop.model.append(nn.Identity())
    with attached(loop, tmp_path / "store", told) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        loop.optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.5})
        with pytest.raises(checkflow.InputError, match="belongs to no model"):
            ckpt.step()
    del late
    frozen = Loop(lambda parameters: torch.optim.AdamW(parameters[:2], lr=0.01))
    with attached(frozen, tmp_path / "frozen", told) as ckpt:
        done = until_learned(ckpt, frozen.iterate)
        frozen.optimizer.add_param_group({"params": list(frozen.model.parameters())[2:]})
        for number in range(done, done + 3):
            frozen.iterate(number)
            ckpt.step()
        assert ckpt.stats().learned_in == 0
        assert any("learns its schedule anew: its state has other tensors" in line for line in told), told
        until_learned(ckpt, frozen.iterate, done + 3)
        ckpt.save()
        state, done = frozen.state(), ckpt._executor.completed
    other = Loop(lambda parameters: torch.optim.AdamW(parameters[:2], lr=0.01))
    other.optimizer.add_param_group({"params": list(other.model.parameters())[2:]})
    with attached(other, tmp_path / "frozen") as ckpt:
        assert ckpt.restore() == done
        assert same(other.state(), state)


def test_what_is_not_resumed_is_not_overtaken(tmp_path: Path) -> None:
    """Nor where the first step() makes room for what the optimizer has only now."""
    with attached(loop := Loop(), tmp_path) as ckpt:
        loop.iterate(0)
        ckpt.step()
    with attached(loop := Loop(), tmp_path) as ckpt:
        loop.iterate(0)
        for _ in range(2):
            with pytest.raises(checkflow.InputError, match="nothing was restored"):
                ckpt.step()
        assert ckpt.restore() == 1


def test_another_batch_size_is_learned(tmp_path: Path) -> None:
    """A final batch that is smaller is not."""
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        for number in range(done, done + 40):
            loop.rows = 4 if number % 10 == 9 else 8
            loop.iterate(number)
            ckpt.step()
        assert not any("anew" in line for line in told)
        loop.rows = 4
        before = ckpt.schedule
        deadline = time.monotonic() + LONG_S
        number = done + 40
        while ckpt.schedule is before and time.monotonic() < deadline:
            loop.iterate(number)
            ckpt.step()
            number += 1
            time.sleep(0.01)
    assert any("anew: iterations are model(4x6), optimizer, not model(8x6), optimizer" in line for line in told), told
    assert dict(ckpt.schedule.arguments) == {"iteration": "model(4x6), optimizer"}


def test_iterations_that_all_differ_have_a_plan_and_are_told_of(tmp_path: Path) -> None:
    """None is common: one of them is planned for, once, and training is told."""
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:

        def iterate(number: int) -> None:
            loop.rows = 3 + number % 17
            loop.iterate(number)

        done = until_learned(ckpt, iterate)
        for number in range(done, done + 60):
            iterate(number)
            ckpt.step()
    assert sum("iterations differ, and none is common" in line for line in told) == 1, told
    assert ckpt.stats().discarded == 0


def test_what_is_carried_and_not_listed_is_told_once_by_name_and_line(tmp_path: Path) -> None:
    """A moving average and a hidden state, in the loop's own variables."""
    loop, told = Loop(), list[str]()
    average = [parameter.detach().clone() for parameter in loop.model.parameters()]
    hidden = torch.zeros(8)
    with attached(loop, tmp_path / "store", told) as ckpt:
        for number in range(6):
            loop.iterate(number)
            hidden = hidden * 0.5 + number
            with torch.no_grad():
                for mean, parameter in zip(average, loop.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
            ckpt.step()
            time.sleep(0.02)
    lines = [line for line in told if "in no checkpoint" in line]
    here = Path(__file__).name
    assert len(lines) == 2, lines
    assert any(line.startswith("average.") and here in line for line in lines), lines
    assert any(line.startswith("hidden ") and here in line for line in lines), lines


def test_with_audit_it_is_an_error(tmp_path: Path) -> None:
    loop = Loop()
    hidden = torch.zeros(8)
    with pytest.raises(AuditError, match="hidden"), attached(loop, tmp_path / "store", audit=True) as ckpt:
        for number in range(6):
            loop.iterate(number)
            hidden = hidden * 0.5 + number
            ckpt.step()
    assert hidden.sum() > 0


def test_what_is_listed_is_not_told_of(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    held = {"hidden": torch.zeros(8)}
    with attached(loop, tmp_path / "store", told, extra={"held": held}) as ckpt:
        for number in range(8):
            loop.iterate(number)
            held["hidden"] = held["hidden"] * 0.5 + number
            ckpt.step()
        until_learned(ckpt, loop.iterate, 8)
    assert not any("in no checkpoint" in line for line in told), told


GLOBAL = {"total": torch.zeros(8), "forgotten": torch.zeros(8)}


@pytest.mark.parametrize("kind", ["modules", "dict", "variables", "object"])
def test_one_of_two_alike_that_is_not_listed_is_told_of(kind: str, tmp_path: Path) -> None:
    """Neither the size of what is listed beside it hides it, nor that what is listed can lead to it."""
    loop, told = Loop(), list[str]()
    fast, slow = (copy.deepcopy(loop.model).requires_grad_(False) for _ in range(2))
    held, cell = {"hidden": torch.zeros(8)}, torch.zeros(8)
    both = Both()
    extra: dict[str, object] = {
        "modules": {"fast": fast, "held": held},
        "dict": {"fast": fast, "slow": slow, "held": held},
        "variables": {"fast": fast, "slow": slow, "held": held, "vars": checkflow.Variables(GLOBAL, "total")},
        "object": {"fast": fast, "slow": slow, "held": held, "both": both},
    }[kind]
    named = {"modules": "slow.", "dict": "cell ", "variables": "GLOBAL.forgotten ", "object": "both.forgotten "}
    with attached(loop, tmp_path / "store", told, extra=extra) as ckpt:
        for number in range(6):
            loop.iterate(number)
            held["hidden"] = held["hidden"] * 0.5 + number
            if kind == "dict":
                cell = cell * 0.5 + number
            if kind == "variables":
                GLOBAL["total"] = GLOBAL["total"] * 0.5 + number
                GLOBAL["forgotten"] = GLOBAL["forgotten"] * 0.5 + number
            if kind == "object":
                both.count(number)
            with torch.no_grad():
                for one, other, new in zip(fast.parameters(), slow.parameters(), loop.model.parameters(), strict=True):
                    one.lerp_(new, 0.1)
                    other.lerp_(new, 0.01)
            ckpt.step()
            time.sleep(0.02)
    lines = [line for line in told if "in no checkpoint" in line]
    assert len(lines) == 1 and lines[0].startswith(named[kind]), lines


class Both:
    """It gives a copy of one of its tensors, and leaves the other out."""

    def __init__(self) -> None:
        self.total, self.forgotten = torch.zeros(9), torch.zeros(8)

    def count(self, number: int) -> None:
        self.total, self.forgotten = self.total * 0.5 + number, self.forgotten * 0.5 + number

    def state_dict(self) -> dict[str, object]:
        return {"total": self.total.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


def test_a_planner_that_dies_costs_the_plan_alone(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:
        learner, begun = ckpt._adapting._learner, 0  # type: ignore[union-attr]
        while learner._planner is None:
            loop.iterate(begun)
            ckpt.step()
            begun += 1
        os.kill(learner._planner.pid, signal.SIGKILL)
        for number in range(begun, begun + 11):
            loop.iterate(number)
            ckpt.step()
            time.sleep(0.01)
        assert ckpt.stats().learned_in == 0
    assert any("no schedule was learned" in line and "process ended" in line for line in told), told
    other = Loop()
    with attached(other, tmp_path / "store") as ckpt:
        assert ckpt.restore() == begun + 11


def test_an_iteration_that_cannot_be_recorded_runs_as_it_would_have(tmp_path: Path) -> None:
    """Sparse gradients have no storage: what the recorder has to say of them reaches the user, not the training."""
    torch.manual_seed(0)
    model, told = nn.Embedding(20, 4, sparse=True), list[str]()
    optimizer = torch.optim.SparseAdam(model.parameters())
    with checkflow.attach(model, optimizer, store=tmp_path / "store", notify=told.append) as ckpt:
        for _ in range(12):
            torch.autograd.backward(model(torch.tensor([1, 2])).sum())
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            ckpt.step()
        assert ckpt.stats().learned_in == 0
        assert ckpt.learning == "knowing"
    assert any("no schedule was learned" in line and "sparse" in line for line in told), told
    assert list_checkpoints(tmp_path / "store")[0].iteration == 12


def test_iterations_are_as_long_as_the_device_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the host, which may give a GPU several of them before the first has ended."""
    usual_ns, asked = 12_345, list[Request]()

    class OfDevice(Stopwatch):
        def stop(self) -> Callable[[], int]:
            return lambda: usual_ns

    def noted(planner: Planner, request: Request) -> None:
        asked.append(request)
        ask(planner, request)

    ask = Planner.ask
    monkeypatch.setattr(learner, "Stopwatch", OfDevice)
    monkeypatch.setattr(Planner, "ask", noted)
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        until_learned(ckpt, loop.iterate)
    times = {round(request.graph.iteration_time_ns / usual_ns, 2) for request in asked}
    assert times == {1.0}


def test_a_graph_that_no_hook_saw_being_captured_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who learns, who looks before it records; the runtime knows of it then, too."""
    loop, told, captured = Loop(), list[str](), [False]
    monkeypatch.setattr(follower, "has_cuda_graphs", lambda: captured[0])
    with attached(loop, tmp_path / "store", told) as ckpt:
        captured[0] = True
        for number in range(8):
            loop.iterate(number)
            ckpt.step()
        assert ckpt.stats().learned_in == 0
        assert ckpt._engine.executor.bound.opaque
    assert any("captured as a CUDA graph" in line for line in told), told


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("policy", ["checkflow", "checkfreq"])
def test_compiled_code_is_left_alone(
    policy: str, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at its operators would run others; each checkpoint is right without. By checkfreq none is waited for."""
    copies_take(monkeypatch, lambda _: 0.02)
    loop, told = Loop(), list[str]()
    loop.model.compile(backend="eager")
    with attached(loop, tmp_path / "store", told, policy=policy, interval=interval) as ckpt:
        for number in range(9):
            loop.iterate(number)
            ckpt.step()
        stats = ckpt.stats()
        assert stats.learned_in == 0
        waited = Cause.UNWATCHED in stats.stall_ns_by_cause
        copied = stats.snapshot_bytes >= (9 // interval - 1) * ckpt.schedule.state_bytes
        assert (waited, copied) == (policy != "checkfreq", policy == "checkfreq"), stats
    assert any("compiled" in line for line in told), told
    other = Loop()
    with attached(other, tmp_path / "store") as ckpt:
        assert ckpt.restore() == 9
    assert same(other.state(), loop.state())


def test_restoring_in_the_middle_of_learning(tmp_path: Path) -> None:
    """While an iteration is recorded, too: what was recorded is of no use then."""
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        for number in range(2):
            loop.iterate(number)
            ckpt.step()
        ckpt.save()
        state = loop.state()
        loop.iterate(2)
        assert ckpt.restore() == 2
        assert same(loop.state(), state)
        done = until_learned(ckpt, loop.iterate, 2)
        ckpt.save()
        assert ckpt.restore() == done


def test_an_interval_is_kept_to(tmp_path: Path) -> None:
    loop = Loop()
    with attached(loop, tmp_path / "store", interval=3) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        for number in range(done, done + 9):
            loop.iterate(number)
            ckpt.step()
        assert ckpt.schedule.interval == 3
    stored = {found.iteration for found in list_checkpoints(tmp_path / "store")}
    assert stored
    assert all(iteration % 3 == 0 or iteration == done + 9 for iteration in stored)


def test_the_planner_has_no_torch_and_the_trainer_no_solver() -> None:
    planner = "import sys, checkflow.learning.planning; print([m for m in ('torch', 'scipy') if m in sys.modules])"
    trainer = (
        "import sys, checkflow; checkflow.attach; "
        "print([m for m in ('scipy', 'highspy', 'gurobipy', 'pulp', 'networkx') if m in sys.modules])"
    )
    for code in (planner, trainer):
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_the_planner_is_asked_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes the planner ten times as long as planning."""
    asked = tmp_path / "asked"
    ask = Planner.ask

    def noted(planner: Planner, request: Request) -> None:
        asked.write_bytes(pickle.dumps(request))
        ask(planner, request)

    monkeypatch.setattr(Planner, "ask", noted)
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        until_learned(ckpt, loop.iterate)
    code = f"import pickle, sys; pickle.load(open({str(asked)!r}, 'rb')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_who_only_restores_starts_no_planner(tmp_path: Path) -> None:
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        learning = ckpt._adapting._learner  # type: ignore[union-attr]
        assert ckpt.restore() == 0 and learning._planner is None
        until_learned(ckpt, loop.iterate)
        assert learning._planner is not None


def test_the_planner_has_ended_when_training_goes_on(tmp_path: Path) -> None:
    """An idle process would stay for the rest of the training."""
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        until_learned(ckpt, loop.iterate)
        planner = ckpt._adapting._learner._planner  # type: ignore[union-attr]
        assert planner is not None
        assert planner._process.wait(LONG_S) == 0


def test_the_planner_gives_way_to_training() -> None:
    """From before it imports, and where each session is a scheduling group: that would have a core for itself."""
    with contextlib.closing(Planner()) as planner:
        deadline = time.monotonic() + LONG_S
        while os.getpriority(os.PRIO_PROCESS, planner.pid) != min(19, os.nice(0) + NICENESS):
            assert time.monotonic() < deadline
        group = Path(f"/proc/{planner.pid}/autogroup")
        while group.exists() and group.read_text().split()[-1] != str(NICENESS):
            assert time.monotonic() < deadline


def test_the_planner_ends_with_its_trainer() -> None:
    planner = Planner()
    assert planner._process.stdin is not None
    planner._process.stdin.close()
    with contextlib.closing(planner):
        assert planner._process.wait(LONG_S) == 0
