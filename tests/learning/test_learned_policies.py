"""attach(policy=...): schedules that are learned by another policy, on a link that cannot carry the state in one go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_link import asking, copies_take
from test_attach_learning import LONG_S, Loop, attached, same, until_learned
from torch import nn

import checkflow
from checkflow import policies
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.errors import InputError
from checkflow.graphfile import read_graph
from checkflow.learning.kept import FOLDER
from checkflow.learning.messages import DEFAULT_POLICY, IN_LANES, IN_PARTS, POLICIES
from checkflow.learning.planner import Planner
from checkflow.runtime import parts
from checkflow.runtime.counters import Cause
from checkflow.runtime.update import Update
from checkflow.schedule import Schedule, read_schedule
from checkflow.store.format.reader import list_checkpoints
from checkflow.torch_internals import innermost_mode
from checkflow.verify import verify

CARRIED = 0.6  # of the state, in an iteration


class Wide(Loop):
    """Most of its state is what an optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.shrinks = False

    def iterate(self, number: int) -> None:
        super().iterate(number)
        if self.shrinks:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.99)


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "ask", asking(CARRIED))


def kept(store: Path) -> Schedule:
    """What was learned, once it verifies."""
    (path,) = (store / FOLDER).glob("*.schedule.json")
    schedule = read_schedule(path)
    verify(schedule, read_graph(path.with_name(path.name.replace("schedule", "graph"))))
    return schedule


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_is_learned_by_each_policy(tmp_path: Path, policy: str) -> None:
    """What is checkpointed by it ends a run as one that was never interrupted, from the next start on at once."""
    plain, loop, told = Wide(), Wide(), list[str]()
    with attached(loop, tmp_path / "store", told, policy=policy) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        for number in range(done, done + 20):
            loop.iterate(number)
            ckpt.step()
        assert ckpt.schedule.policy == policy
        assert ckpt.status().skipped == 0
    schedule = kept(tmp_path / "store")
    laned = policy in IN_LANES
    assert (schedule.slot_lanes > 1) == laned
    assert schedule.replica == (policy == "lowdiff_plus")
    assert schedule.interval == 1 or not laned
    assert not any("rolling" in line for line in told)  # who chose is not advised
    how = "updates a replica with, adds" if schedule.replica else f"with a part from each of {schedule.lanes}, adds"
    assert any(how in line for line in told) == laned, told
    again = Wide()
    with attached(again, tmp_path / "store", told, policy=policy) as ckpt:
        first = ckpt.restore()
        assert first == done + 20
        assert ckpt.schedule == schedule
        for number in range(first, first + 10):
            again.iterate(number)
            ckpt.step()
    for number in range(first + 10):
        plain.iterate(number)
    assert same(plain.state(), again.state())


def until_learned_anew(ckpt: Checkpointer, loop: Wide, done: int) -> int:
    """Iterations completed when another schedule is followed."""
    followed, deadline = ckpt.schedule, time.monotonic() + LONG_S
    ckpt._adapting._learner.anew("asked for")  # type: ignore[union-attr]
    while ckpt.schedule is followed:
        assert time.monotonic() < deadline
        loop.iterate(done)
        ckpt.step()
        done += 1
        time.sleep(0.01)
    return done


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("policy", ["checkflow", "gockpt", "lowdiff"])
def test_an_update_that_is_recorded_is_guarded_within(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each foreach function that writes state, as in any other iteration."""
    torn, left = list[int](), list[int]()
    monkeypatch.setattr(Update, "_torn", lambda update: torn.append(len(update._left)))
    end = Update.end

    def ended(update: Update) -> None:
        if innermost_mode() is not None and update._last:
            left.append(len(update._left))
        end(update)

    monkeypatch.setattr(Update, "end", ended)
    loop = Wide()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01, foreach=True)
    with attached(loop, tmp_path / "store", policy=policy) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        for _ in range(2):
            done = until_learned_anew(ckpt, loop, done)
    assert left and not any(left) and not torn


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_followed_does_not_notice_that_it_is_learned_anew(tmp_path: Path, policy: str) -> None:
    """An iteration is recorded while checkpoints go on as they were."""
    loop, told = Wide(), list[str]()
    with attached(loop, tmp_path / "store", told, policy=policy) as ckpt:
        first = done = until_learned(ckpt, loop.iterate)
        interval, before = ckpt.schedule.interval, ckpt.stats()
        for _ in range(3):  # each lane's turn comes
            parts = ckpt._executor.parts
            done = until_learned_anew(ckpt, loop, done)
            assert parts is None or not parts.refused
        after = ckpt.stats()
        assert after.skipped == after.discarded == 0
        assert after.started - before.started >= (done - first) // interval - 1
    assert sum("learned its schedule" in line for line in told) == 4, told
    assert not any("whole" in line for line in told), told
    again = Wide()
    with attached(again, tmp_path / "store", policy=policy) as ckpt:
        assert ckpt.restore() == done
    assert same(loop.state(), again.state())


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("policy", ["rolling", "lowdiff", "gockpt"])
def test_what_no_counter_sees_later_on_is_found_by_another_proof(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are written through .data, after the first proofs. What is not exact any more is not kept for long."""
    monkeypatch.setattr("checkflow.runtime.sampled._TENSORS", 0)  # as where a few bytes do not show it
    loop, told = Wide(), list[str]()
    rarely = checkflow.PersistEvery(iterations=10**6)  # so that a slot is always free
    with attached(loop, tmp_path / "store", told, policy=policy, persist_every=rarely) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        until = done + 4 * ckpt.schedule.lanes * ckpt.schedule.interval
        for number in range(done, until):
            loop.iterate(number)
            ckpt.step()
        assert ckpt.stats().stall_ns_by_cause[Cause.PROOF]
        monkeypatch.setattr(parts, "PROVEN_AGAIN_S", 0.0)
        for number in range(until, until + 40):
            loop.iterate(number)
            for parameter in loop.model.parameters():
                parameter.data.mul_(0.99)
            ckpt.step()
        line = next((line for line in told if "learns its schedule anew" in line), "")
        assert line, told
        assert "is not the same, to the bit, when its updates are made again; it was, " in line
        assert line.endswith(" s ago, and checkpoints since then may be wrong")
    again = Wide()
    with attached(again, tmp_path / "store", policy=policy) as ckpt:
        assert ckpt.restore() == until + 40
    assert same(loop.state(), again.state())


class Meddled(Wide):
    """Something is done now and then, after a backward pass and before its update."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0], self.model[1] = nn.Linear(64, 64), nn.BatchNorm1d(64, affine=False)
        self.model[4] = nn.Linear(64, 64)
        self.model.append(nn.Linear(64, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
        self.batch = np.zeros((self.rows, 64), np.float32)
        self.arrays = [parameter.detach().numpy().copy() for parameter in self.model.parameters()]
        self.meddles = ""

    def iterate(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        if self.meddles == "refilled":  # what was given to the first layer is overwritten, as a loader does
            self.batch[:] = torch.randn(self.rows, 64, generator=generator).numpy()
            x = torch.from_numpy(self.batch)
        else:
            x = torch.randn(self.rows, 64, generator=generator)
        loss = nn.functional.cross_entropy(self.model(x), torch.randint(3, (self.rows,), generator=generator))
        torch.autograd.backward(self.scaler.scale(loss) if self.meddles == "scaled" else loss)
        if self.meddles in MEDDLING:
            MEDDLING[self.meddles](self)
        if self.meddles == "scaled":
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


def _zero_steps(loop: Meddled) -> None:
    for state in loop.optimizer.state.values():
        state["step"].zero_()


def _new_steps(loop: Meddled) -> None:
    for state in loop.optimizer.state.values():
        state["step"] = torch.tensor(0.0)


def _clear(loop: Meddled) -> None:
    loop.optimizer.state.clear()


def _new_state(loop: Meddled) -> None:
    loop.optimizer.state = defaultdict(dict)


def _new_group(loop: Meddled) -> None:
    """With another tensor as its rate, which is state."""
    (group,) = loop.optimizer.param_groups
    loop.optimizer.param_groups[0] = group | {"lr": torch.tensor([0.02])}


def _foreach(loop: Meddled) -> None:
    loop.optimizer.param_groups[0]["foreach"] = True


def _new_module(loop: Meddled) -> None:
    loop.model[1] = nn.BatchNorm1d(64, affine=False)


def _elsewhere(loop: Meddled) -> None:
    """Gradients that somebody hands over in arrays of NumPy."""
    for parameter, array in zip(loop.model.parameters(), loop.arrays, strict=True):
        assert parameter.grad is not None
        array[:] = parameter.grad.numpy()
        parameter.grad = torch.from_numpy(array)


MEDDLING: dict[str, Callable[[Meddled], None]] = {
    "zeroed": _zero_steps, "replaced": _new_steps, "cleared": _clear, "anew": _new_state, "foreach": _foreach,
    "module": _new_module, "elsewhere": _elsewhere, "group": _new_group,
}  # fmt: skip
ONCE = [("rolling", how) for how in (*MEDDLING, "scaled") if how != "group"] + [
    ("checkflow", "cleared"),
    ("checkflow", "anew"),
]
ONCE += [("lowdiff", "zeroed"), ("lowdiff", "scaled"), ("gockpt", "foreach")]


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize(("policy", "how"), ONCE)
def test_what_is_done_to_state_now_and_then_is_seen(policy: str, how: str, tmp_path: Path) -> None:
    """Each checkpoint has the bytes that its iteration left, whatever was done before, in it, or since."""
    loop, states = Meddled(), dict[int, list[torch.Tensor]]()
    given: dict[str, Any] = {"policy": policy, "retention": checkflow.Retention(last=100)}
    with attached(loop, tmp_path / "store", **given) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        for number in range(done, done + 24):
            loop.meddles = how if number == done + 14 else ""
            loop.iterate(number)
            ckpt.step()
            states[number + 1] = loop.state()
    later = [found.iteration for found in list_checkpoints(tmp_path / "store") if found.iteration > done]
    again, others = Meddled(), list[int]()
    with attached(again, tmp_path / "store", **given) as ckpt:
        for iteration in later:
            again.optimizer.param_groups[0]["foreach"] = (how == "foreach" and iteration > done + 14) or None
            ckpt.restore(iteration)
            others += [iteration] * (not same(again.state(), states[iteration]))
    assert later and not others


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("policy", ["rolling", "lowdiff"])
@pytest.mark.parametrize("what", ["refilled", "elsewhere"])
def test_what_lies_in_memory_that_is_filled_again_is_kept_by_its_bytes(
    what: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch, of which a gradient is a product, or gradients: they may leave later."""
    copies_take(monkeypatch, lambda _: 0.005)
    loop, states = Meddled(), dict[int, list[torch.Tensor]]()
    loop.meddles = what
    given: dict[str, Any] = {"policy": policy, "retention": checkflow.Retention(last=100)}
    with attached(loop, tmp_path / "store", **given) as ckpt:
        done = until_learned(ckpt, loop.iterate)
        factored = [row.parameter.name for row in ckpt.schedule.gradients if row.factor_rows]
        assert ("model/0.weight" in factored) == (what == "refilled")
        for number in range(done, done + 8):
            loop.iterate(number)
            ckpt.step()
            states[number + 1] = loop.state()
    monkeypatch.undo()
    again = Meddled()
    with attached(again, tmp_path / "store", **given) as ckpt:
        for found in list_checkpoints(tmp_path / "store"):
            if found.iteration > done:
                ckpt.restore(found.iteration)
                assert same(again.state(), states[found.iteration]), found.iteration


@pytest.mark.usefixtures("slow_link")
def test_a_layer_that_is_frozen_when_its_run_goes_on_is_thawed_later(tmp_path: Path) -> None:
    """As it was when what is kept of it was learned."""
    done = 0
    for _ in range(2):
        loop = Wide()
        loop.model[3].requires_grad_(False)
        with attached(loop, tmp_path / "store", policy="rolling") as ckpt:
            assert ckpt.restore() == done
            loop.model[3].requires_grad_(True)
            done = until_learned(ckpt, loop.iterate, done) if done == 0 else done
            assert any(row.factor_rows for row in ckpt.schedule.gradients)
            for number in range(done, done + 12):
                loop.iterate(number)
                ckpt.step()
            done += 12
    last = Wide()
    with attached(last, tmp_path / "store", policy="rolling") as ckpt:
        assert ckpt.restore() == done
    assert same(loop.state(), last.state())


@pytest.mark.parametrize("how", ["cleared", "anew", "module", "group"])
def test_state_in_a_container_that_is_new_is_saved(how: str, tmp_path: Path) -> None:
    """The former one, which nothing leads to any more, still holds what was bound."""
    loop, again = Meddled(), Meddled()
    for each in (loop, again):
        each.optimizer.param_groups[0]["lr"] = torch.tensor([0.01])
    with attached(loop, tmp_path / "store") as ckpt:
        done = until_learned(ckpt, loop.iterate)
        loop.meddles = how
        loop.iterate(done)
        ckpt.step()
        loop.meddles = ""
        for number in range(done + 1, done + 4):
            loop.iterate(number)
            ckpt.step()
    with attached(again, tmp_path / "store") as ckpt:
        assert ckpt.restore() == done + 4
    assert same(loop.state(), again.state())
    assert again.optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]


@pytest.mark.usefixtures("slow_link")
def test_rolling_is_in_force_at_any_stop(tmp_path: Path) -> None:
    """Each start ends at another iteration: while learning, at the first in lanes, and at each lane."""
    plain, stops = Wide(), [3, 8, 40, 41, 42, 43, 44, 60]
    for stop in stops:
        loop = Wide()
        with attached(loop, tmp_path / "store", policy="rolling") as ckpt:
            for number in range(ckpt.restore(), stop):
                while number >= 20 and ckpt.learning == "planning":
                    time.sleep(0.01)
                loop.iterate(number)
                ckpt.step()
        first = stops[stops.index(stop) - 1] if stop != stops[0] else 0
        for number in range(first, stop):
            plain.iterate(number)
        assert same(plain.state(), loop.state()), stop
    assert kept(tmp_path / "store").lanes > 1


@pytest.mark.usefixtures("slow_link")
def test_what_cannot_be_saved_in_parts_is_learned_otherwise(tmp_path: Path) -> None:
    """First without factors, whose products a larger batch is not of; then as a whole, where updates are not all."""
    loop, told = Wide(), list[str]()
    with attached(loop, tmp_path / "store", told, policy="rolling") as ckpt:
        done = until_learned(ckpt, loop.iterate)
        assert any(row.factor_rows for row in ckpt.schedule.gradients)
        loop.rows = 64
        done = _until(ckpt, loop, done, lambda schedule: not any(row.factor_rows for row in schedule.gradients))
        assert ckpt.schedule.lanes > 1
        assert any("learns its schedule anew: the gradient of" in line for line in told), told
        loop.shrinks = True
        done = _until(ckpt, loop, done, lambda schedule: schedule.policy == DEFAULT_POLICY)
        assert any("learns its schedule anew: " in line and "written by something else" in line for line in told), told
        for number in range(done, done + 6):
            loop.iterate(number)
            ckpt.step()
    assert kept(tmp_path / "store").policy == DEFAULT_POLICY
    again = Wide()
    with attached(again, tmp_path / "store", told, policy="rolling") as ckpt:
        assert ckpt.restore() == done + 6
        assert ckpt.schedule.policy == DEFAULT_POLICY
    assert same(loop.state(), again.state())


def _until(ckpt: Checkpointer, loop: Loop, done: int, is_so: Callable[[Schedule], bool]) -> int:
    deadline = time.monotonic() + LONG_S
    while not (ckpt.stats().learned_in and is_so(ckpt.schedule) and ckpt.learning == "knowing"):
        assert time.monotonic() < deadline, ckpt.schedule.policy
        loop.iterate(done)
        ckpt.step()
        done += 1
    return done


@pytest.mark.usefixtures("slow_link")
def test_restoring_in_between_changes_no_plan(tmp_path: Path) -> None:
    """What it writes is not taken for what an update left."""
    loop, told = Wide(), list[str]()
    with attached(loop, tmp_path / "store", told, policy="rolling") as ckpt:
        done = until_learned(ckpt, loop.iterate) + 8
        for number in range(done - 8, done):
            loop.iterate(number)
            ckpt.step()
        schedule = ckpt.schedule
        for _ in range(2):
            assert ckpt.restore() == done
            for number in range(done, done + 6):
                loop.iterate(number)
                ckpt.step()
            done += 6
        assert ckpt.schedule == schedule
    assert not any("learns its schedule anew" in line for line in told), told


@pytest.mark.usefixtures("slow_link")
def test_where_host_memory_has_no_room_for_lanes_it_is_learned_otherwise(tmp_path: Path) -> None:
    """Training goes on with the slots that it has, and the next start, which finds no such plan, says why."""
    loop, told = Wide(), list[str]()
    with attached(loop, tmp_path / "store", told, policy="rolling", slots=40) as ckpt:
        _until(ckpt, loop, 0, lambda schedule: schedule.policy == DEFAULT_POLICY)
    assert any("learns its schedule anew: slots: 40 is not supported; use 1 to " in line for line in told), told
    told.clear()
    with attached(Wide(), tmp_path / "store", told, policy="rolling") as ckpt:
        assert ckpt.schedule.policy == DEFAULT_POLICY
    assert any("policy 'rolling' could not be followed in an earlier run" in line for line in told), told
    other = Wide()
    with attached(other, tmp_path / "other", policy="rolling") as ckpt:
        until_learned(ckpt, other.iterate)
        assert ckpt.schedule.lanes > 1
    told.clear()
    with attached(Wide(), tmp_path / "other", told, policy="rolling", slots=40) as ckpt:  # of a schedule that is kept
        assert ckpt.schedule.policy == DEFAULT_POLICY
    assert any("learns its schedule anew: slots: 40 is not supported" in line for line in told), told


@pytest.mark.usefixtures("slow_link")
def test_who_chose_no_policy_is_told_of_one(tmp_path: Path) -> None:
    loop, told = Wide(), list[str]()
    with attached(loop, tmp_path / "store", told) as ckpt:
        until_learned(ckpt, loop.iterate)
    assert any('with policy="rolling" each iteration may have one' in line for line in told), told
    other, told = Wide(), []
    with attached(other, tmp_path / "other", told, interval=2) as ckpt:
        until_learned(ckpt, other.iterate)
    assert not any("rolling" in line for line in told), told


class OnesOwn(torch.optim.AdamW):
    """Whose updates are its own."""


def test_updates_of_ones_own_are_learned_as_a_whole_at_once(tmp_path: Path) -> None:
    """In parts they would be refused once they were, and learned anew."""
    loop, told = Wide(), list[str]()
    loop.optimizer = OnesOwn(loop.model.parameters(), lr=0.01)
    with attached(loop, tmp_path / "store", told, policy="rolling") as ckpt:
        until_learned(ckpt, loop.iterate)
        assert ckpt.schedule.policy == DEFAULT_POLICY
    (line,) = [line for line in told if "OnesOwn" in line]
    assert "learns by policy 'checkflow', not 'rolling': updates of OnesOwn are none of torch's own" in line
    assert not any("anew" in line for line in told), told


def test_what_another_policy_learned_is_not_taken(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store") as ckpt:
        until_learned(ckpt, loop.iterate)
    with attached(Loop(), tmp_path / "store", told, policy="checkfreq", start_over=True):
        assert any("learns its schedule" in line for line in told), told


def test_policies_are_those_that_there_are() -> None:
    """Their names stand where nothing that plans is imported."""
    assert sorted(POLICIES) == list(policies.names())
    assert DEFAULT_POLICY in POLICIES and set(IN_PARTS) < set(POLICIES)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policy": "roling"}, "policy: 'roling' is none by which a schedule is learned; use checkflow, "),
        ({"policy": "auto"}, "policy: 'auto' is none by which"),
        ({"policy": "rolling", "slots": 1}, "slots: 1 has no room for the next checkpoint beside the newest"),
        ({"policy": "gockpt", "overhead": 0.05}, "overhead: policy 'gockpt' takes its checkpoints in parts"),
    ],
)
def test_what_no_schedule_is_learned_by_is_refused(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as refusal:
        attached(Loop(), tmp_path / "store", **given)
    assert str(refusal.value).startswith(told)
    assert "\n" not in str(refusal.value)


def test_a_policy_is_not_for_a_schedule_that_is_given(tmp_path: Path) -> None:
    loop = Loop()
    with attached(loop, tmp_path / "store") as ckpt:
        until_learned(ckpt, loop.iterate)
        schedule = ckpt.schedule
    with pytest.raises(InputError, match="policy: 'rolling' is for a schedule that is learned, and one is given"):
        checkflow.attach(loop.model, loop.optimizer, store=tmp_path / "other", schedule=schedule, policy="rolling")
