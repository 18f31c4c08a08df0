"""Modules, parameters and buffers that come and go in training, of which no optimizer hears: checkpoints have them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, prune

import checkflow
from checkflow.errors import InputError
from checkflow.runtime import unmoved
from checkflow.state.members import Members
from checkflow.store.trainer.persist_every import PersistEvery

AT, END = 3, 8  # iterations before the change, and in all


class Counting(nn.Module):
    """Has no tensor, and something to save."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + self.calls / 100)

    def get_extra_state(self) -> object:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Net(nn.Module):
    gain: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between = nn.ModuleList([nn.BatchNorm1d(8, affine=False), nn.Identity()])
        self.register_buffer("gain", None)
        self.first.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * getattr(self.first, "scale", 1.0)
        for each in self.between:
            x = each(x)
        if self.gain is not None:
            self.gain = self.gain * 0.5 + x.detach().abs().mean() * 0.5
            x = x / self.gain
        found: torch.Tensor = self.last(x)
        return found


def scale_anew(net: Net) -> None:
    """As many buffers as before."""
    del net.first.scale
    net.first.register_buffer("other", torch.full((8,), 2.0))


CHANGES: dict[str, Callable[[Net], object]] = {
    "a normalization": lambda net: net.between.append(nn.BatchNorm1d(8, affine=False)),
    "frozen parameters": lambda net: net.between.append(nn.Linear(8, 8).requires_grad_(requires_grad=False)),
    "a buffer": lambda net: net.last.register_buffer("late", torch.randn(3)),
    "a buffer that was None": lambda net: setattr(net, "gain", torch.ones(())),
    "another buffer": scale_anew,
    "no buffer": lambda net: delattr(net.first, "scale"),
    "another module": lambda net: net.between.__setitem__(1, nn.BatchNorm1d(8, affine=False)),
    "no module": lambda net: net.between.pop(0),
    "pruned": lambda net: prune.l1_unstructured(net.first, "weight", 0.3),  # type: ignore[no-untyped-call]
    "a parametrization": lambda net: parametrizations.spectral_norm(net.first),
    "extra state": lambda net: net.between.append(Counting()),
}


class Loop:
    """The change is made before iteration AT + 1, by who goes on after it before all."""

    def __init__(self, change: str, done: int = 0) -> None:
        self.net, self.change = Net(), CHANGES[change]
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.changed = done > AT
        if self.changed:
            self.change(self.net)

    def iterate(self, number: int) -> None:
        if number >= AT and not self.changed:
            self.changed = True
            self.change(self.net)
        x = torch.randn(8, 6)
        torch.autograd.backward(self.net(x).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def attach(self, store: Path) -> checkflow.Checkpointer:
        return checkflow.attach(
            self.net, self.optimizer, store=store, when_full="wait", persist_every=PersistEvery(iterations=1),
            tell=lambda _: None, notify=lambda _: None,
        )  # fmt: skip

    def state(self) -> dict[str, object]:
        found: dict[str, object] = dict(self.net.state_dict())
        for number, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in entries.items()}
        found["generator"] = torch.get_rng_state()
        return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in found.items()}


def assert_same(left: dict[str, object], right: dict[str, object]) -> None:
    assert left.keys() == right.keys()
    for name, one in left.items():
        other = right[name]
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else (
            one == other
        ), name  # fmt: skip


def reference(change: str) -> dict[str, object]:
    loop = Loop(change)
    for number in range(END):
        loop.iterate(number)
    return loop.state()


@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_and_goes_in_training_is_as_the_checkpoint_has_it(change: str, tmp_path: Path) -> None:
    """Of each iteration since, and a resume goes on with it as training would have."""
    states = {}
    loop = Loop(change)
    with loop.attach(tmp_path) as ckpt:
        for number in range(AT + 3):
            loop.iterate(number)
            ckpt.step()
            states[number + 1] = loop.state()
            ckpt.save()
    for done in (AT + 1, AT + 3):
        again = Loop(change, done)
        with again.attach(tmp_path) as ckpt:
            assert ckpt.restore(done) == done
            assert_same(again.state(), states[done])
            for number in range(done, END if done > AT + 1 else done):
                again.iterate(number)
                ckpt.step()
    assert_same(again.state(), reference(change))


UNCHANGED = {  # what a run that has not made the change yet is told: the state, where it is, what to do
    "a buffer": (
        "model/last.late: is in the checkpoint, but not in this model",
        "training adds to it, add what it had",
    ),
    "no buffer": (
        "model/first.scale: is in this model, but not in the checkpoint",
        "training takes from it, take what it had no more",
    ),
    "another buffer": (
        "model/first.scale: is in this model, but not in the checkpoint, and model/first.other the other way round",
        "training changes it, change it into what it was",
    ),
    "pruned": (
        "model/first.weight: is in this model, but not in the checkpoint, and model/first.weight_mask and 1 more the "
        "other way round",
        "training changes it, change it into what it was",
    ),
    "extra state": (
        "model/between.2._extra_state: is in the checkpoint, but not in this model",
        "training adds to it, add what it had",
    ),
}


@pytest.mark.parametrize("change", UNCHANGED)
def test_a_model_without_the_change_is_told_which_state_and_of_which_iteration(change: str, tmp_path: Path) -> None:
    where, advice = UNCHANGED[change]
    loop = Loop(change)
    with loop.attach(tmp_path) as ckpt:
        for number in range(AT + 1):
            loop.iterate(number)
            ckpt.step()
    again = Loop(change)
    with again.attach(tmp_path) as ckpt:
        with pytest.raises(InputError) as refusal:
            ckpt.restore()
        again.change(again.net)
        assert ckpt.restore() == AT + 1
    said = str(refusal.value)
    assert said.startswith(where) and said.endswith(f"; where {advice} at iteration {AT + 1} and call restore() again")
    assert_same(again.state(), loop.state())


@pytest.mark.parametrize("change", ["a normalization", "a buffer that was None"])
def test_a_killed_training_goes_on_with_what_it_grew(change: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", __file__, change, str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    loop = Loop(change, AT + 2)
    with loop.attach(tmp_path) as ckpt:
        done = ckpt.restore()
        assert done == AT + 2
        for number in range(done, END):
            loop.iterate(number)
            ckpt.step()
    assert_same(loop.state(), reference(change))


def test_a_layer_may_come_in_an_iteration_that_loads_its_optimizers_state(tmp_path: Path) -> None:
    loop = Loop("another module")
    with loop.attach(tmp_path) as ckpt:
        for number in range(AT + 2):
            if number == AT:
                loop.net.between[1] = late = nn.BatchNorm1d(8)
                loop.optimizer.add_param_group({"params": list(late.parameters())})
                loop.optimizer.load_state_dict(loop.optimizer.state_dict())
            loop.changed = True
            loop.iterate(number)
            ckpt.step()
        assert ckpt.status().staged_iteration == AT + 2


def test_a_schedule_that_was_given_is_of_what_was_there(tmp_path: Path) -> None:
    """One line, at the next checkpoint; nothing is left out of it unsaid."""
    loop = Loop("a buffer")
    schedule = checkflow.compile(checkflow.Training(loop.net, loop.optimizer, lambda: loop.iterate(0)))
    loop = Loop("a buffer")
    ckpt = checkflow.attach(loop.net, loop.optimizer, store=tmp_path, schedule=schedule, tell=lambda _: None)
    with pytest.raises(InputError, match=r"^model/last\.late: appeared after attach and is not in the schedule"), ckpt:
        for number in range(END):
            loop.iterate(number)
            ckpt.step()
            assert number < AT


def test_a_module_in_the_place_of_one_of_its_kind_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule's was in evaluation: nothing tells what this one writes, and now and then would be too late."""
    monkeypatch.setattr(unmoved, "SELDOM", 1e9)
    loop = Loop("a buffer")
    loop.changed = True
    loop.net.between[0].eval()
    schedule = checkflow.compile(checkflow.Training(loop.net, loop.optimizer, lambda: loop.iterate(0)))
    with checkflow.attach(
        loop.net, loop.optimizer, store=tmp_path, schedule=schedule, when_full="wait", tell=lambda _: None,
        notify=lambda _: None, persist_every=PersistEvery(iterations=1),
    ) as ckpt:  # fmt: skip
        for number in range(14):
            if number == 6:
                loop.net.between[0] = nn.BatchNorm1d(8, affine=False)
            loop.iterate(number)
            ckpt.step()
            ckpt.save()
            saved = load_file(sorted(tmp_path.glob("*/model.safetensors"))[-1])
            assert_same(dict(saved), dict(loop.net.state_dict()))


def test_members_are_those_that_state_is_of() -> None:
    """What is only replaced is none, nor is what a resume makes again until it is saved."""
    net = Net()
    training = checkflow.Training(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda: None)
    known = Members.of(training)
    net.first.weight = nn.Parameter(torch.zeros(8, 6))
    net.first.scale = torch.zeros(8)
    assert not known.changed()
    for change in CHANGES.values():
        change(net := Net())
        assert not Members.of(checkflow.Training(net, [], lambda: None)).changed()
    net = Net()
    net.register_buffer("passing", torch.ones(1), persistent=False)
    known = Members.of(checkflow.Training(net, [], lambda: None))
    del net.passing
    net.register_buffer("passing", torch.ones(1))
    assert known.changed()


def test_members_are_of_each_model_and_each_listed_module() -> None:
    nets = one, two, listed = Net(), Net(), Net()
    training = checkflow.Training((one, two), [], lambda: None, extra={"listed": listed})
    for grown in nets:
        known = Members.of(training)
        grown.between.append(nn.Identity())
        assert known.changed()


if __name__ == "__main__":
    victim = Loop(sys.argv[1])
    attached = victim.attach(Path(sys.argv[2]))
    attached.restore()
    for iteration in range(AT + 2):
        victim.iterate(iteration)
        attached.step()
    signal.raise_signal(signal.SIGKILL)
