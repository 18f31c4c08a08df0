"""What follows step() though a checkpoint should have it is told; what an iteration begins with is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkflow

LATE = "changed after step() and before the next update"


class Count:
    """An object of the user's."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Life:
    def __init__(self, store: Path, told: list[str]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average, self.count = copy.deepcopy(self.model), Count()
        self.held: dict[str, object] = {"number": 0, "ahead": torch.zeros(1)}
        self.ckpt = checkflow.attach(
            self.model, self.optimizer, store=store, scheduler=self.scheduler,
            extra={"average": self.average, "count": self.count, "held": self.held}, notify=told.append,
        )  # fmt: skip

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()

    def schedule(self) -> None:
        self.scheduler.step()

    def mean(self) -> None:
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(new, 0.1)

    def counted(self) -> None:
        self.count.steps += 1

    def fetched(self) -> None:
        self.held["ahead"] = torch.randn(1)

    def numbered(self) -> None:
        self.held["number"] = int(str(self.held["number"])) + 1

    def step(self) -> None:
        self.ckpt.step()


Part = Callable[[Life], None]
UPDATE, STEP, SCHEDULE, MEAN, COUNT = Life.update, Life.step, Life.schedule, Life.mean, Life.counted


@pytest.mark.parametrize(
    ("parts", "late"),
    [
        pytest.param([UPDATE, SCHEDULE, MEAN, COUNT, STEP], "", id="last"),
        pytest.param([Life.fetched, MEAN, COUNT, UPDATE, SCHEDULE, STEP], "", id="begins with them"),
        pytest.param([UPDATE, STEP, Life.fetched, Life.numbered], "", id="what is fetched ahead"),
        pytest.param([UPDATE, STEP, SCHEDULE], "scheduler: ", id="scheduler"),
        pytest.param([UPDATE, SCHEDULE, STEP, MEAN], "extra.average: ", id="average"),
        pytest.param([UPDATE, SCHEDULE, MEAN, STEP, COUNT], "extra.count: ", id="object"),
        pytest.param([UPDATE, STEP, SCHEDULE, MEAN, COUNT], "extra.average and 2 more: ", id="all"),
    ],
)
def test_what_follows_step_is_told_once_in_each_run(parts: list[Part], late: str, tmp_path: Path) -> None:
    for begun in (0, 4):
        told: list[str] = []
        life = Life(tmp_path / "store", told)
        with life.ckpt as ckpt:
            assert ckpt.restore() == begun
            for _ in range(4):
                for part in parts:
                    part(life)
        lines = [line.partition(f"{tmp_path / 'store'}: ")[2] for line in told if LATE in line]
        assert len(lines) == bool(late) and all(line.startswith(late) for line in lines), told
        assert not life.optimizer._optimizer_step_post_hooks


class Slow:
    """Weights that follow the model's at each second update, as Lookahead's do."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = [(each.detach().clone(), each) for each in model.parameters()]
        self.updates = 0

    def follow(self, *_: object) -> None:
        self.updates += 1
        if self.updates % 2 == 0:
            with torch.no_grad():
                for slow, fast in self.pairs:
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)


class FollowedAfter(torch.optim.SGD):
    slow: Slow

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.slow.follow()
        return found


class FollowedBefore(torch.optim.SGD):
    slow: Slow

    def step(self, closure: Any = None) -> Any:
        self.slow.follow()
        return super().step(closure)


@pytest.mark.parametrize("late", [False, True], ids=["last", "late"])
@pytest.mark.parametrize("hooked", ["before attach", "after attach", "subclass"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_an_update_changes_itself_is_of_the_update(place: str, hooked: str, late: bool, tmp_path: Path) -> None:
    """In a step() of the user's own, or a hook of it; what is changed after step() is told of there, too."""
    model = nn.Linear(4, 2)
    slow, told = Slow(model), list[str]()
    count = Count()
    optimizer: torch.optim.Optimizer
    if hooked == "subclass":
        optimizer = (FollowedBefore if place == "before" else FollowedAfter)(model.parameters(), 0.1)
        optimizer.slow = slow
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = optimizer.register_step_pre_hook if place == "before" else optimizer.register_step_post_hook
    if hooked == "before attach":
        hook(slow.follow)
    extra: dict[str, object] = {"count": count} | {f"slow{k}": each for k, (each, _) in enumerate(slow.pairs)}
    with checkflow.attach(model, optimizer, store=tmp_path, extra=extra, notify=told.append) as ckpt:
        if hooked == "after attach":
            hook(slow.follow)
        for _ in range(5):
            torch.autograd.backward(model(torch.randn(3, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
            count.steps += late
    lines = [line.partition(": ")[2] for line in told if LATE in line]
    assert len(lines) == late and all(line.startswith("extra.count: ") for line in lines), told


def test_an_epochs_end_is_no_such_thing(tmp_path: Path) -> None:
    told: list[str] = []
    life = Life(tmp_path / "store", told)
    with life.ckpt as ckpt:
        ckpt.restore()
        for _ in range(2):
            for _ in range(3):
                life.update()
                ckpt.step()
            life.scheduler.step()
    assert not [line for line in told if LATE in line]


@pytest.mark.parametrize(
    ("order", "told"), [("gradient step update", True), ("update gradient step", True), ("gradient update step", False)]
)
@pytest.mark.parametrize("in_place", [False, True], ids=["to none", "to zeros"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_update_of_a_gradient_from_before_the_last_step_is_told_of(
    tmp_path: Path, order: str, told: bool, in_place: bool, compiled: bool
) -> None:
    """Where nobody records operators, too. The other optimizer drops its gradients late, which is nothing."""
    model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizer, others = torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), 0.1)
    forward = torch.compile(model, backend="eager") if compiled else model
    said: list[str] = []
    both = ([model, other], [optimizer, others])
    with checkflow.attach(*both, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:

        def gradient() -> None:
            others.zero_grad(set_to_none=not in_place)
            torch.autograd.backward(forward(torch.randn(2, 4)).square().mean() + other(torch.ones(4)).square().mean())
            others.step()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)

        done = {"gradient": gradient, "update": update, "step": ckpt.step}
        for _ in range(6):
            for each in order.split():
                done[each]()
    lines = [line for line in said if "a resume goes on without that update" in line]
    assert len(lines) == told and all("model.0/weight: the update used" in line for line in lines), said


def test_a_hook_that_drops_gradients_hides_no_old_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    said: list[str] = []
    with checkflow.attach(model, optimizer, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for _ in range(4):
            torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
            ckpt.step()
            optimizer.step()
    assert len([line for line in said if "a resume goes on without that update" in line]) == 1, said


def test_a_gradient_of_zeros_is_nothing_that_a_resume_lacks(tmp_path: Path) -> None:
    """Of a layer that an iteration passes by, where gradients are zeroed in place: the resumed run has it, too."""

    def life(until: int, store: str) -> tuple[list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        said: list[str] = []
        with checkflow.attach(
            layers, optimizer, store=tmp_path / store, notify=said.append, tell=lambda _: None
        ) as ckpt:
            for number in range(ckpt.restore(), until):
                torch.autograd.backward(layers[number % 3](torch.randn(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                ckpt.step()
        return [parameter.detach() for parameter in layers.parameters()], said

    whole, said = life(8, "whole")
    assert not [line for line in said if "a resume goes on without that update" in line]
    life(4, "store")
    resumed, said = life(8, "store")
    assert not [line for line in said if "a resume goes on without that update" in line]
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("zeroed", ["before", "after"])
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_are_nothing_that_anybody_looks_into(
    make: Callable[..., torch.optim.Optimizer], zeroed: str, tmp_path: Path
) -> None:
    """Still there at step(), which is called without an update, too; and a resume goes on as one life would."""

    def live(store: Path, *lives: int) -> list[float]:
        for until in lives:
            torch.manual_seed(0)
            model = nn.EmbeddingBag(50, 4, sparse=True)
            optimizer = make(model.parameters(), lr=0.1)
            with checkflow.attach(model, optimizer, store=store, notify=told.append, tell=lambda _: None) as ckpt:
                for number in range(ckpt.restore(), until):
                    if zeroed == "before":
                        optimizer.zero_grad()
                    torch.autograd.backward(model(torch.randint(0, 50, (8, 2))).square().sum())
                    if number % 3 != 2:
                        optimizer.step()
                    if zeroed == "after":
                        optimizer.zero_grad()
                    ckpt.step()
        return model.weight.flatten().tolist()

    told: list[str] = []
    assert live(tmp_path / "whole", 8) == live(tmp_path / "cut", 3, 8)
    assert not [line for line in told if "gradient" in line and "use dense gradients" not in line], told
