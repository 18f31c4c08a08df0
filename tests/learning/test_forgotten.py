"""What a training changes and nobody attached is named: generators, networks, what other trainings do not hold."""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_attach_learning import LONG_S, Loop, attached
from torch import nn

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.learning import forgotten
from checkflow.learning.forgotten import Forgotten
from checkflow.training import Training

LACKING = "in no checkpoint"


class Draws:
    """Gives and takes the state of what it has."""

    def __init__(self, *generators: object) -> None:
        self.generators = generators

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        assert state_dict == {}


@pytest.fixture(autouse=True)
def _looks_whenever_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_SHARE", 1e9)


def lacking(told: list[str]) -> list[str]:
    return [line.partition(": ")[2] if line.startswith("/") else line for line in told if LACKING in line]


def iterate_all(ckpt: Checkpointer, iterate: Callable[[int], None], count: int) -> None:
    for number in range(count):
        iterate(number)
        ckpt.step()


def until_recorded(ckpt: Checkpointer, iterate: Callable[[int], None]) -> None:
    """An iteration was, and what it carries is told; the planner need not have answered."""
    number, deadline = 0, time.monotonic() + LONG_S
    while ckpt.learning not in ("planning", "planned", "knowing"):
        assert time.monotonic() < deadline
        iterate(number)
        ckpt.step()
        number += 1


def test_a_generator_that_draws_is_named_once_with_what_to_do(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    noise, rng, old, dice = torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
    unused, default, shuffle = torch.Generator(), torch.default_generator, random.shuffle  # saved anyway

    def iterate(number: int) -> None:
        loop.iterate(number)
        torch.randn(3, generator=noise)
        rng.normal(), old.rand(), dice.random(), shuffle([1, 2]), np.random.rand(), torch.rand(1, generator=default)

    with attached(loop, tmp_path / "store", told) as ckpt:
        iterate_all(ckpt, iterate, 20)
    lines = {line.partition(" ")[0].rpartition(".")[2]: line for line in lacking(told)}
    assert lines.keys() == {"noise", "rng", "old", "dice"} and len(lacking(told)) == 4, told
    assert "noise (torch.Generator): draws as training goes" in lines["noise"]
    assert lines["noise"].endswith('give it: attach(generators={"noise": ...})')
    assert "rng (numpy.random.Generator)" in lines["rng"] and lines["rng"].endswith('attach(extra={"rng": ...})')
    assert "random.Random" in lines["dice"] and "numpy.random.RandomState" in lines["old"]
    assert unused.initial_seed()


def test_a_generator_that_is_attached_or_seeded_anew_is_not_named(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    noise, rng, dice, seeded = torch.Generator(), np.random.default_rng(0), random.Random(0), torch.Generator()

    def iterate(number: int) -> None:
        loop.iterate(number)
        torch.randn(3, generator=noise)
        torch.randn(3, generator=seeded.manual_seed(number))
        rng.normal(), dice.random()

    given: dict[str, Any] = {"generators": {"noise": noise}, "extra": {"draws": Draws(rng, [dice])}}
    with attached(loop, tmp_path / "store", told, **given) as ckpt:
        iterate_all(ckpt, iterate, 20)
    assert not lacking(told), told


def test_a_generator_is_named_where_a_schedule_is_given(tmp_path: Path) -> None:
    loop, told, noise = Loop(), list[str](), torch.Generator()
    with attached(loop, tmp_path / "first") as ckpt:
        iterate_all(ckpt, loop.iterate, 2)
        schedule = ckpt.schedule
    with attached(loop, tmp_path / "second", told, schedule=schedule) as ckpt:
        for number in range(5):
            loop.iterate(number)
            torch.randn(3, generator=noise)
            ckpt.step()
    (line,) = lacking(told)
    assert line.startswith("noise (torch.Generator)")


def test_beside_compiled_code_a_network_that_is_written_is_named(tmp_path: Path) -> None:
    """And it is said that nothing else is looked for."""
    loop, told = Loop(), list[str]()
    loop.model.compile(backend="eager")
    ema, still = copy.deepcopy(loop.model).requires_grad_(False), nn.Linear(2, 2)

    def iterate(number: int) -> None:
        loop.iterate(number)
        with torch.no_grad():
            for mean, parameter in zip(ema.parameters(), loop.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    with attached(loop, tmp_path / "store", told) as ckpt:
        iterate_all(ckpt, iterate, 9)
    (line,) = lacking(told)
    assert "ema.0.weight and 5 more" in line and line.endswith("list the module: attach(extra={...})")
    (line,) = [line for line in told if "no schedule was learned" in line]
    assert line.endswith("generators and modules alone are looked for, so see to it that the rest is attached")
    assert still.weight.numel()


@pytest.mark.parametrize("listed", [False, True])
def test_a_network_that_is_written_now_and_then_and_read_is_named(tmp_path: Path, listed: bool) -> None:
    """A copy for evaluation, which the iteration does not read, and scratch, which it writes first, are not."""
    loop, told = Loop(), list[str]()
    target, best, scratch = (copy.deepcopy(loop.model).eval().requires_grad_(False) for _ in range(3))

    def iterate(number: int) -> None:
        scratch.load_state_dict(loop.model.state_dict())
        target(torch.ones(2, 6)), scratch(torch.ones(2, 6))
        loop.iterate(number)
        if number % 5 == 4:
            target.load_state_dict(loop.model.state_dict())
            best.load_state_dict(loop.model.state_dict())

    with attached(loop, tmp_path / "store", told, extra={"target": target} if listed else {}) as ckpt:
        until_recorded(ckpt, iterate)
        iterate_all(ckpt, iterate, 3 * ckpt.stats().iterations)
    if listed:
        assert not lacking(told), told
    else:
        (line,) = lacking(told)
        assert "target.0.weight and " in line and "list it" in line


def test_what_another_training_has_attached_is_not_named(tmp_path: Path) -> None:
    """Its weights, its optimizer's state, what it lists, its generators; what neither has is."""
    left, right, told = Loop(), Loop(), list[str]()
    average, neither = copy.deepcopy(right.model).requires_grad_(False), torch.zeros(3)
    noise = torch.Generator()

    def iterate_right(number: int) -> None:
        right.iterate(number)
        torch.randn(3, generator=noise)
        neither.add_(neither.sum() + number)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), right.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    given: dict[str, Any] = {"extra": {"average": average}, "generators": {"noise": noise}}
    with (
        attached(left, tmp_path / "left", told) as one,
        attached(right, tmp_path / "right", told, **given) as other,
    ):
        number = 0
        while {one.learning, other.learning} - {"planning", "planned", "knowing"}:
            for iterate, ckpt in ((left.iterate, one), (iterate_right, other)):
                iterate(number)
                ckpt.step()
            number += 1
    assert {line.partition(" ")[0] for line in lacking(told)} == {"iterate_right.neither"}, told


def test_what_is_no_longer_attached_is_named(tmp_path: Path) -> None:
    first, loop, told, noise = Loop(), Loop(), list[str](), torch.Generator()
    with attached(first, tmp_path / "first", generators={"noise": noise}) as closed:
        pass

    def iterate(number: int) -> None:
        loop.iterate(number)
        torch.randn(3, generator=noise)

    with attached(loop, tmp_path / "second", told) as ckpt:
        iterate_all(ckpt, iterate, 5)
    (line,) = lacking(told)
    assert line.startswith("iterate.noise ") and closed.status()


def test_of_a_namespace_the_variables_that_are_listed_alone_are_known(tmp_path: Path) -> None:
    loop, told = Loop(), list[str]()
    names: dict[str, Any] = {"batch": torch.zeros(8), "hidden": torch.zeros(5)}

    def iterate(number: int) -> None:
        loop.iterate(number)
        for name in ("batch", "hidden"):
            names[name] = names[name] * 0.5 + number

    with attached(loop, tmp_path / "store", told, extra={"loop": checkflow.Variables(names, "batch")}) as ckpt:
        until_recorded(ckpt, iterate)
    (line,) = lacking(told)
    assert line.startswith("iterate.names.hidden ")


def test_a_replay_memory_is_named(tmp_path: Path) -> None:
    """A deque: what the iteration before put there is read from it. Listed as it is named, it is no longer."""
    loop, told = Loop(), list[str]()
    memory: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=50)

    def iterate(number: int) -> None:
        memory.append((torch.rand(3), torch.rand(2)))
        torch.stack([first for first, _ in memory]).sum()
        loop.iterate(number)

    with attached(loop, tmp_path / "store", told) as ckpt:
        until_recorded(ckpt, iterate)
    (line,) = lacking(told)
    assert line.startswith("iterate.memory (") and "list it: attach(extra=" in line
    told.clear()
    with attached(loop, tmp_path / "other", told, extra={"memory": memory}) as ckpt:
        until_recorded(ckpt, iterate)
    assert not lacking(told)


def test_looking_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first two looks."""
    monkeypatch.setattr(forgotten, "_SHARE", 0.01)
    clock, looks = [0.0], list[float]()

    def looked(*_: object) -> dict[str, object]:
        looks.append(clock[0])
        clock[0] += 2.0
        return {}

    monkeypatch.setattr(forgotten, "objects_from", looked)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    loop = Loop()
    finder = Forgotten(Training(loop.model, loop.optimizer, lambda: None), print, print)
    for _ in range(2000):
        clock[0] += 1.0
        finder.begins(None)  # type: ignore[arg-type]
    assert looks[:2] == [2.0, 7.0]
    assert looks[2] >= 400 and looks[3] >= 600 and len(looks) <= 5, looks
