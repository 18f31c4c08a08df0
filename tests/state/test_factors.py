"""Gradients that leave as their factors: bit-identical in whatever a linear layer is given, or it is told why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_parts import attached, begun, check_each, planned, records, traced, trained
from torch import nn
from trainings_to_resume import Make, Run

import checkflow
from checkflow import hardware, models
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.models.gpt2 import Conv1D
from checkflow.plan import Problem
from checkflow.plan.rebuilt import in_lanes, over_iterations, rebuilt_in
from checkflow.runtime.device import Batch
from checkflow.runtime.factors import FactorHooks
from checkflow.runtime.host import HostDevice
from checkflow.schedule import Schedule
from checkflow.state.host.objects import HostObjects
from checkflow.torch_internals import freed_since
from checkflow.trace import trace_training
from checkflow.training import Training

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
}


class Net(nn.Module):
    """Linear layers, one of GPT-2's kind, and one that no factors pay for; after one an operator writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(40, 64), nn.Dropout(0.2)
        self.square, self.turned, self.last = Conv1D(64, 64, 0.1), Conv1D(64, 48, 0.1), nn.Linear(48, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.square(self.drop(self.first(x).relu_()))
        return torch.as_tensor(self.last(self.turned(hidden)))


@dataclass
class Now:
    """What an iteration may do otherwise."""

    net: Net
    optimizer: torch.optim.Optimizer
    number: int


Inputs = Callable[[int], torch.Tensor]
Change = Callable[[Now], None]


def nothing(_now: Now) -> None:
    """As it was traced."""


def training(
    optimizer: str,
    inputs: Inputs,
    before: Change = nothing,
    after: Change = nothing,
    ends: Change = nothing,
    penalty: Callable[[Now], torch.Tensor | float] = lambda _: 0.0,
) -> Make:
    """`before` the forward pass something is done, `after` the backward pass, or when the iteration `ends`. A `penalty`
    is added to the loss."""

    def make() -> Run:
        net = Net()
        opt = OPTIMIZERS[optimizer](list(net.parameters()))
        run = Run(Training(net, opt, lambda: None), HostObjects.of(), iter(()))

        def steps() -> Iterator[None]:
            now = Now(net, opt, 0)
            while True:
                now.number += 1
                opt.zero_grad()
                before(now)
                torch.autograd.backward(net(inputs(now.number)).square().mean() + penalty(now))
                after(now)
                opt.step()
                ends(now)
                yield

        run.steps = steps()
        return run

    return make


def schedule_of(make: Make, lanes: int = 3) -> Schedule:
    graph = traced(make)

    def parted(whole: Problem) -> Problem:
        laned = in_lanes(whole, graph, lanes, factors=True)
        assert laned is not None
        return laned

    return planned(graph, parted, "rolling")


def of(*shape: int) -> Inputs:
    return lambda _number: torch.randn(*shape)


def fewer_now_and_then(number: int) -> torch.Tensor:
    """The last batch of an epoch."""
    return torch.randn(1 if number % 3 == 0 else 4, 40)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "inputs", [of(1, 40), of(5, 40), of(2, 3, 40), fewer_now_and_then], ids=["one", "five", "sequences", "fewer"]
)
def test_each_iteration_is_bit_identical(optimizer: str, inputs: Inputs, tmp_path: Path) -> None:
    make = training(optimizer, inputs)
    schedule = schedule_of(make)
    factored = {row.parameter.name: row.factor_rows > 0 for row in schedule.gradients}
    weights = ("model/first.weight", "model/square.weight", "model/turned.weight", "model/last.weight")
    assert [factored[name] for name in weights] == [True, True, True, inputs(1).numel() == 40]
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told
    assert len([record for record in records(tmp_path / "store").values() if "replay" in record]) > 4
    check_each(make, schedule, tmp_path / "store", expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("inputs", [of(5, 40), fewer_now_and_then], ids=["five", "fewer"])
def test_each_checkpoint_of_several_iterations_is_bit_identical(optimizer: str, inputs: Inputs, tmp_path: Path) -> None:
    """As GoCkpt has them: a part's factors leave in each iteration after its own."""
    make = training(optimizer, inputs)
    graph = traced(make)
    schedule = planned(graph, lambda whole: over_iterations(whole, graph, 3, factors=True), "gockpt")
    assert sum(row.factor_rows > 0 for row in schedule.gradients) > 1
    assert {row.back for row in schedule.actions if row.tensor in {g.id for g in schedule.gradients}} == {0, 1}
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told
    assert sum("replay" in record for record in records(tmp_path / "store").values()) == 2
    check_each(make, schedule, tmp_path / "store", expected)


def evaluates(now: Now) -> None:
    """Of other inputs: with gradients, and without."""
    now.net(torch.randn(7, 40))
    with torch.no_grad():
        now.net(torch.randn(3, 40))


def test_what_runs_without_a_backward_pass_makes_no_difference(tmp_path: Path) -> None:
    make = training("adamw", of(2, 40), before=evaluates, ends=evaluates)
    schedule = schedule_of(training("adamw", of(2, 40)))
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told and sum("replay" in record for record in records(tmp_path / "store").values()) > 4
    check_each(make, schedule, tmp_path / "store", expected)


def clipped(now: Now) -> None:
    if now.number == 5:
        nn.utils.clip_grad_norm_(now.net.parameters(), 1e-3)


def scaled(now: Now) -> None:
    """Clipped by hand, where the norm is large: no counter tells of it."""
    if now.number >= 5:
        for parameter in now.net.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.5)


def replaced(now: Now) -> None:
    if now.number == 5:
        now.net.first.weight.grad = torch.as_tensor(now.net.first.weight.grad) * 2


def twice(now: Now) -> None:
    if now.number == 5:
        torch.autograd.backward(now.net(torch.randn(2, 40)).square().mean())


def kept(now: Now) -> None:
    """Of another iteration, to be added to."""
    if now.number == 5:
        for parameter in now.net.parameters():
            parameter.grad = torch.ones_like(parameter)


def hooked(now: Now) -> None:
    if now.number == 5:
        now.net.first.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]


def tied(now: Now) -> None:
    """The layer's weight is used without the layer."""
    if now.number == 5:
        torch.autograd.backward(now.net.first.weight.square().mean())


def decayed(now: Now) -> torch.Tensor | float:
    """The layer's weight has a gradient of its own, too, in the same backward pass."""
    return now.net.first.weight.square().mean() if now.number == 5 else 0.0


def called(now: Now) -> torch.Tensor | float:
    """Another product is added to the layer's."""
    extra = nn.functional.linear(torch.ones(1, 40), now.net.first.weight)
    return extra.square().mean() if now.number == 5 else 0.0


def flattened(now: Now) -> None:
    """Clipped by hand: other gradients may lie where these lay."""
    if now.number == 5:
        parameters = list(now.net.parameters())
        flat = torch.cat([torch.as_tensor(parameter.grad).reshape(-1) for parameter in parameters])
        now.optimizer.zero_grad()
        for parameter, piece in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter).clone() * 0.5


def more(number: int) -> torch.Tensor:
    return torch.randn(3 if number == 5 else 2, 40)


def turned(number: int) -> torch.Tensor:
    return torch.randn(40, 2).t() if number == 5 else torch.randn(2, 40)


@pytest.mark.parametrize(
    "make",
    [
        training("sgd", of(2, 40), after=clipped),
        training("sgd", of(2, 40), after=scaled),
        training("sgd", of(2, 40), after=replaced),
        training("sgd", of(2, 40), before=twice),
        training("sgd", of(2, 40), after=twice),
        training("sgd", of(2, 40), before=kept),
        training("sgd", of(2, 40), before=hooked),
        training("sgd", of(2, 40), before=tied),
        training("sgd", of(2, 40), after=tied),
        training("sgd", of(2, 40), after=flattened),
        training("sgd", of(2, 40), penalty=decayed),
        training("sgd", of(2, 40), penalty=called),
        training("sgd", more),
        training("sgd", turned),
    ],
    ids=[
        "clipped",
        "scaled",
        "replaced",
        "twice",
        "twice later",
        "kept",
        "hooked",
        "tied",
        "tied later",
        "flattened",
        "decayed",
        "called",
        "more",
        "turned",
    ],
)
def test_a_gradient_that_is_no_product_is_told(make: Make, tmp_path: Path) -> None:
    """Once, whatever made it another; each checkpoint before and after is what the training was."""
    schedule = schedule_of(training("sgd", of(2, 40)))
    expected, told = trained(make, schedule, tmp_path / "store")
    assert len(told) == 1 and "is not the product of its factors" in told[0], told
    found = records(tmp_path / "store")
    assert any("replay" in record for iteration, record in found.items() if iteration < 5)
    assert not any("replay" in record for iteration, record in found.items() if iteration >= 5)
    check_each(make, schedule, tmp_path / "store", expected)


def test_another_gradient_at_the_same_address_is_no_product() -> None:
    memory = np.ones((3, 4), dtype=np.float32)
    weight, hooks = nn.Parameter(torch.zeros(3, 4)), FactorHooks(["weight"])
    weight.grad = torch.from_numpy(memory)
    made = hooks._made["weight"]
    made.times, made.product, made.is_gone = 1, weight.grad.data_ptr(), freed_since(weight.grad)
    assert hooks.are_exact("weight", weight)
    weight.grad = torch.from_numpy(memory)
    assert weight.grad.data_ptr() == made.product
    assert not hooks.are_exact("weight", weight)


@pytest.mark.parametrize("kind", ["lent", "torchs", "data"])
def test_an_input_that_is_written_while_it_leaves_does_no_harm(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is filled anew when backward has ended, and a slow link still has to carry what was in it: of NumPy's memory
    there is a copy by then; of torch's own a counter tells, or what has arrived, and so it is told."""
    copy, array = HostDevice._copy, torch.randn(2, 40).numpy()
    held = torch.from_numpy(array) if kind == "lent" else torch.randn(2, 40)

    def slow(device: HostDevice, batch: Batch) -> None:
        if any(found.source.numel() == held.nbytes for found in batch):
            time.sleep(0.05)
        copy(device, batch)

    def refilled(now: Now) -> None:
        if now.number == 5 and kind == "lent":
            array[:] = 3
        elif now.number == 5 and kind == "data":
            held.data.normal_()
        elif now.number == 5:
            with torch.no_grad():
                held.normal_()

    monkeypatch.setattr(HostDevice, "_copy", slow)
    monkeypatch.setattr(HostDevice, "inline_bytes", 0)
    make = training("sgd", lambda _number: held, after=refilled)
    schedule = schedule_of(training("sgd", of(2, 40)))
    expected, told = trained(make, schedule, tmp_path / "store")
    assert len(told) == (kind != "lent") and all("are written before they have left" in line for line in told), told
    check_each(make, schedule, tmp_path / "store", expected)


def test_as_many_threads_make_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there were, whatever there are when it is restored, which stay."""
    make = training("sgd", of(5, 40))
    schedule = schedule_of(make)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    trained(make, schedule, tmp_path / "store")
    monkeypatch.undo()
    torch.set_num_threads(1)
    replays = [record["replay"] for record in records(tmp_path / "store").values() if "replay" in record]
    updates = [update for replay in replays for update in replay["updates"]]  # type: ignore[index]
    assert updates and all(update["threads"] == 3 for update in updates)
    assert {rows for update in updates for rows in update["factor_rows"].values()} == {5}
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with attached(begun(make), schedule, tmp_path / "store", lambda _: None) as ckpt:
        ckpt.restore(max(records(tmp_path / "store")))
    assert asked and asked[::2] == [3] * (len(asked) // 2) and asked[1::2] == [1] * (len(asked) // 2)


def test_alexnet_at_batch_1_has_a_checkpoint_after_each_iteration(tmp_path: Path) -> None:
    """Its state is more than the link carries in an iteration, and so are its gradients."""
    factory = partial(models.factory("alexnet"), batch_size=1)
    graph = hardware.retime(trace_training(factory, model="alexnet").graph, hardware.load_profile("rtx3090"))
    compiled = compile_graph(graph, Options(63 * 10**9, policy="rolling"))
    assert isinstance(compiled, Compiled)
    told: list[str] = []
    made = factory()
    with checkflow.attach(
        made.model, made.optimizer, schedule=compiled.schedule, store=tmp_path / "store", when_full="wait",
        notify=told.append, tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        for _ in range(4):
            made.iteration()
            ckpt.step()
    assert not told and ckpt.stats().started == 4
    again = factory()
    with checkflow.attach(
        again.model, again.optimizer, schedule=compiled.schedule, store=tmp_path / "store", tell=lambda _: None
    ) as ckpt:
        assert ckpt.restore() == 4
    for (name, one), other in zip(
        made.models[0].state_dict().items(), again.models[0].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_no_gradient_of_several_ranks_leaves_as_its_factors() -> None:
    """What an update consumes there is a sum over ranks, or a part of one."""
    graph = traced(training("adamw", lambda number: torch.ones(2, 40) * number))
    assert any(found.factors for found in rebuilt_in(graph))
    of_several = rebuilt_in(replace(graph, world_size=2))
    assert of_several and not any(found.factors for found in of_several)
