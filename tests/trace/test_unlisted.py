"""What an iteration carries and nobody listed is named; what is no state is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel
from trainings import FEATURES, batch, loop, mlp

from checkflow import Training
from checkflow.trace import trace_training
from checkflow.trace.storages import Ledger
from checkflow.trace.unlisted import Watch
from checkflow.unlisted import Unlisted

CARRIED = {"running_loss": {"loss.total"}}  # of tests/trace/trainings.py


def names(factory: Callable[[], Training], *, real: bool = False) -> list[Unlisted]:
    return list(trace_training(factory, model="m", real=real).graph.unlisted)


def line_of(factory: Callable[[], Training], text: str) -> str:
    """ "file.py:12" of the line of a factory that has this text."""
    code = factory.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    for number in count(code.co_firstlineno):
        if text in lines[number - 1]:
            return f"{code.co_filename}:{number}"
    raise AssertionError(text)


@pytest.mark.parametrize("name", FEATURES)
def test_a_training_that_lists_all_is_named_nothing(name: str) -> None:
    assert {found.name for found in names(FEATURES[name])} == CARRIED.get(name, set())


def averaged() -> Training:
    model, (x, y) = mlp(), batch()
    ema, sgd = AveragedModel(model), optim.SGD(model.parameters(), 0.1)

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        sgd.step()
        sgd.zero_grad()
        ema.update_parameters(model)

    return Training(model, sgd, iteration)


def hidden() -> Training:
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 3)
    state = torch.zeros(4, 5)

    def loss() -> Tensor:
        nonlocal state
        after = cell(x, state)
        state = after.detach()
        squares: Tensor = after.square()
        return squares.mean()

    return loop(cell, optim.SGD(cell.parameters(), 0.1), loss)


def detached_in_place() -> Training:
    """The state is the very tensor that the loss had, cut from its graph at the iteration's end."""
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 3)
    kept = {"state": torch.zeros(4, 5)}
    sgd = optim.SGD(cell.parameters(), 0.1)

    def iteration() -> None:
        after = cell(x, kept["state"])
        torch.autograd.backward(after.square().mean())
        sgd.step()
        sgd.zero_grad()
        kept["state"] = after.detach_()

    return Training(cell, sgd, iteration)


def fetched_ahead() -> Training:
    """As nanoGPT's loop does it."""
    model = mlp()
    data = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)

    def fetch() -> tuple[Tensor, Tensor]:
        places = torch.randint(0, 99, (8,)).tolist()
        return torch.stack([torch.from_numpy(data[i]) for i in places]), torch.randint(0, 3, (8,))

    x, y = fetch()

    def loss() -> Tensor:
        nonlocal x, y
        logits, target = model(x), y
        x, y = fetch()
        return F.cross_entropy(logits, target)

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


def static_input() -> Training:
    """The next batch is copied into place when the iteration ends, as for a CUDA graph."""
    model, (x, y) = mlp(), batch()
    sgd = optim.SGD(model.parameters(), 0.1)

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        sgd.step()
        sgd.zero_grad()
        x.copy_(torch.randn(8, 4))

    return Training(model, sgd, iteration)


def queue() -> Training:
    """A part of a tensor is overwritten in each iteration (MoCo)."""
    model, (x, y), kept = mlp(), batch(), torch.zeros(5, 3)

    def loss() -> Tensor:
        out = model(x)
        kept[0] = out.detach()[0]
        return F.cross_entropy(out, y) + kept.mean()

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


def scratch_buffer() -> Training:
    """Not persistent, so state_dict leaves it out, and yet carried."""
    model, (x, y) = mlp(), batch()
    model.register_buffer("mean", torch.zeros(3), persistent=False)

    def loss() -> Tensor:
        out = model(x)
        model.mean.lerp_(out.detach().mean(0), 0.1)  # type: ignore[operator]
        return F.cross_entropy(out - model.mean, y)

    return loop(model, optim.SGD(model.parameters(), 0.1), loss)


@pytest.mark.parametrize(
    ("factory", "expected", "text"),
    [
        (hidden, {"state": 80}, "after = cell"),
        (detached_in_place, {"kept.state": 80}, "after = cell"),
        (fetched_ahead, {"x": 128, "y": 64}, "return torch.stack"),
        (static_input, {"x": 128}, "x.copy_"),
        (queue, {"kept": 60}, "kept[0] ="),
        (scratch_buffer, {"model.mean": 12}, "lerp_"),
    ],
)
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_what_is_carried_is_named(
    factory: Callable[[], Training], expected: dict[str, int], text: str, real: bool
) -> None:
    found = names(factory, real=real)
    assert {one.name.removeprefix("loss."): one.size_bytes for one in found} == expected
    assert {one.where for one in found} == {line_of(factory, text)}


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_moving_average_is_named_tensor_by_tensor(real: bool) -> None:
    found = names(averaged, real=real)
    model = mlp()
    expected = {f"ema.module.{name}" for name, _ in model.named_parameters()} | {"ema.n_averaged"}
    assert {one.name for one in found} == expected
    assert {one.where for one in found} == {line_of(averaged, "update_parameters")}


class Means:
    """Gives a copy of one of two tensors that are alike, and the other itself."""

    def __init__(self) -> None:
        self.given, self.copied, self.neither = torch.zeros(3), torch.zeros(3), torch.zeros(3)

    def update(self, x: Tensor) -> None:
        for mean in (self.given, self.copied, self.neither):
            mean.lerp_(x.detach().mean(0), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"given": self.given, "copied": self.copied.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.given, self.copied = state_dict["given"], state_dict["copied"].clone()


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_of_what_is_listed_a_tensor_that_is_given_itself_is_not_taken_for_one_that_is_copied(real: bool) -> None:
    def factory() -> Training:
        model, x, means = nn.Linear(3, 2), torch.randn(4, 3), Means()
        sgd = optim.SGD(model.parameters(), 0.1)

        def iteration() -> None:
            torch.autograd.backward(model(x - means.given - means.copied - means.neither).square().mean())
            sgd.step()
            sgd.zero_grad()
            means.update(x)

        return Training(model, sgd, iteration, extra={"means": means})

    assert [one.name for one in names(factory, real=real)] == ["means.neither"]


def test_what_takes_the_place_of_what_was_freed_did_not_exist_before() -> None:
    """A storage that the iteration allocates may get the identity of one that it freed."""
    kept = torch.zeros(1)
    ledger = Ledger()
    watch = Watch(ledger, {"kept": kept}, averaged())
    storage = ledger.see(kept)
    assert watch.existed(storage)
    watch.saw(torch.ops.aten.ones.default, (), frozenset(), [kept])  # as if another lay there now
    assert not watch.existed(storage)


def gradients(loop_of: str, *, in_place: bool, foreach: bool) -> Callable[[], Training]:
    """What becomes of a gradient between two iterations."""

    def factory() -> Training:
        model, (x, y) = mlp(), batch()
        adam = optim.AdamW(model.parameters(), 0.1, foreach=foreach)

        def backward() -> None:
            torch.autograd.backward(F.cross_entropy(model(x), y))

        def update() -> None:
            adam.step()
            adam.zero_grad(set_to_none=not in_place)

        def iteration() -> None:
            if loop_of == "late":  # step() stands between backward and update
                update()
                backward()
            elif loop_of == "late, clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                update()
                backward()
            elif loop_of == "damped":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.9)
                backward()
                adam.step()
            elif loop_of == "dropped after":
                backward()
                update()
            elif loop_of == "dropped before":
                adam.zero_grad(set_to_none=not in_place)
                backward()
                backward()
                adam.step()

        if loop_of.startswith("late"):
            backward()
        return Training(model, adam, iteration)

    return factory


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize(
    ("in_place", "foreach"), [(False, False), (True, False), (True, True)], ids=["to none", "to zeros", "at once"]
)
@pytest.mark.parametrize("loop_of", ["late", "late, clipped", "damped", "dropped after", "dropped before"])
def test_a_gradient_that_the_next_iteration_uses_is_named(
    loop_of: str, in_place: bool, foreach: bool, real: bool
) -> None:
    found = names(gradients(loop_of, in_place=in_place, foreach=foreach), real=real)
    carried = [] if loop_of.startswith("dropped") else [f"model/{name}.grad" for name, _ in mlp().named_parameters()]
    assert [one.name for one in found] == carried
    assert all(one.is_gradient for one in found)


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "deque": lambda mean: deque([mean], maxlen=1),
    "list": lambda mean: [mean],
    "tuple": lambda mean: (mean,),
    "dict": lambda mean: {0: mean},
}


class Averaging(optim.Optimizer):
    """Keeps a mean of the gradients in a container."""

    def __init__(self, parameters: Iterable[nn.Parameter], container: str, where: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        beside = self.beside = dict[Any, Any]()
        (group,) = self.param_groups
        self.weights: list[nn.Parameter] = group["params"]
        self.contained = CONTAINERS[container]
        places = {"state": [self.state[each] for each in self.weights], "own": [self.state] * len(self.weights)}
        places |= {"group": [group] * len(self.weights), "beside": [beside] * len(self.weights)}
        self.places = [(place, f"kept{number}") for number, place in enumerate(places[where])]
        if where == "state":
            self.places = [(place, "kept") for place, _ in self.places]
        for weight, (place, key) in zip(self.weights, self.places, strict=True):
            place[key] = self.contained(torch.zeros_like(weight))

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for weight, (place, key) in zip(self.weights, self.places, strict=True):
            assert weight.grad is not None
            place[key] = self.contained(place[key][0] * 0.9 + weight.grad)
            weight.sub_(place[key][0] * 0.1)


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("where", ["state", "own", "group", "beside"])
@pytest.mark.parametrize("container", sorted(CONTAINERS))
def test_what_an_optimizer_keeps_in_a_container_is_saved(container: str, where: str, real: bool) -> None:
    """And not what it keeps elsewhere."""

    def factory() -> Training:
        model, (x, y) = mlp(), batch()
        optimizer = Averaging(model.parameters(), container, where)
        return loop(model, optimizer, lambda: F.cross_entropy(model(x), y))

    assert bool(names(factory, real=real)) is (where == "beside")


class Feedback:
    """Gives the error of a gradient that was rounded, which each iteration replaces."""

    def __init__(self) -> None:
        self.error: Tensor | None = None

    def state_dict(self) -> dict[str, object]:
        return {"error": self.error}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.error = state_dict["error"]  # type: ignore[assignment]


def on_a_callbacks_thread() -> Training:
    """As the callbacks of a communication hook's future are, which no recorder sees."""
    model, (x, y) = mlp(), batch()
    sgd, feedback = optim.SGD(model.parameters(), 0.1), Feedback()
    weight = next(model.parameters())
    kept: list[Tensor] = []

    def iteration() -> None:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        assert weight.grad is not None
        if feedback.error is not None:
            weight.grad.add_(feedback.error)
        copy = weight.grad.clone()
        kept[:] = [copy]  # of the same size, and new in each iteration
        rounded = (copy * 64).round() / 64
        weight.grad.copy_(rounded)

        def end() -> None:
            feedback.error = copy - rounded

        ended = Thread(target=end)
        ended.start()
        ended.join()
        sgd.step()
        sgd.zero_grad()

    return Training(model, sgd, iteration, {"feedback": feedback})


def test_what_is_listed_may_be_replaced_where_nobody_records() -> None:
    """And something else that is new is not taken for it."""
    assert names(on_a_callbacks_thread, real=True) == []
