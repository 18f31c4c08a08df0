"""Trainings whose state is not what torch.optim's is: shared, replaced, turned around, wrapped, or named alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from checkflow.training import Training


class _Own(torch.optim.Optimizer):
    """Each subclass updates one parameter at a time."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Shared(_Own):
    """A table that all parameters read (as a quantization map is), and a sum that all of them add to."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            held: dict[str, Any] = next((other for other in self.state.values() if other), {})
            state["table"] = held.get("table", torch.linspace(0.5, 1.5, 16))
            state["sum"] = held.get("sum", torch.zeros(16))
            state["moment"] = torch.zeros_like(parameter)
        state["sum"].add_(parameter.grad.sum())  # type: ignore[union-attr]
        state["moment"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(state["moment"] * state["table"].mean(), alpha=group["lr"]).add_(state["sum"].mean(), alpha=1e-3)


class Turning(_Own):
    """At the fourth update the basis is made anew, column-major; from the seventh on each time, either way in turn."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        updates = group["updates"]
        columns = gradient.reshape(len(gradient), -1)
        if not state:
            state["outer"] = torch.eye(len(columns))
            state["basis"] = torch.eye(len(columns)) + 0.1
            state["still"] = torch.ones(len(columns), 2)
        state["outer"].lerp_(columns @ columns.T, 0.3)
        if updates == 4 or updates >= 7:
            turned = torch.tanh(state["outer"] + state["basis"]).T.contiguous().T
            state["basis"] = turned if updates % 2 == 0 else turned.contiguous()
            state["still"] = state["still"].t() if len(columns) == 2 else state["still"].t().contiguous().t()
        parameter.sub_((state["basis"] @ columns).reshape(gradient.shape), alpha=group["lr"])


class Replacing(_Own):
    """Both its average and the parameter are other tensors after each update."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.get("average", torch.zeros_like(parameter))
        state["average"] = average * 0.9 + parameter.grad
        state["count"] = state.get("count", torch.tensor(0.0)) + 1
        parameter.data = parameter.data - group["lr"] * state["average"]


class Flat(_Own):
    """The moments of all parameters are parts of one storage, made in the first update."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            every = [p for one in self.param_groups for p in one["params"]]
            parts = torch.split(torch.zeros(sum(p.numel() for p in every)), [p.numel() for p in every])
            for one, part in zip(every, parts, strict=True):
                self.state[one]["moment"] = part.view_as(one)
        state["moment"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(state["moment"], alpha=group["lr"])


class Tied(_Own):
    """It keeps the parameter itself among its state, under another name."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["master"], state["moment"] = parameter.detach(), torch.zeros_like(parameter)
        state["moment"].mul_(0.9).add_(parameter.grad)
        state["master"].sub_(state["moment"], alpha=group["lr"])


class Late(_Own):
    """At the fourth update there is more state than before; at the sixth less."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["moment"], state["first"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        if group["updates"] == 4:
            state["late"] = torch.full_like(parameter, 0.5)
        if group["updates"] == 6:
            del state["first"]
        state["moment"].mul_(0.9).add_(parameter.grad)
        if "late" in state:
            state["late"].mul_(0.9).add_(state["moment"])
        parameter.sub_(state.get("late", state["moment"]), alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside another optimizer, without Optimizer.__init__; each third update goes back halfway."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults = dict(optimizer.defaults)
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % 3 == 0:
                for parameter in group["params"]:
                    slow = self.state[parameter]["slow"]
                    slow.data.lerp_(parameter.data, 0.5)
                    parameter.data.copy_(slow)


class Passing(torch.optim.Optimizer):
    """Passes another optimizer's state and groups on, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def _net(out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, out))


def _of(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], Training]:
    def factory() -> Training:
        torch.manual_seed(0)
        net = _net()
        optimizer = make(net.parameters())

        def iteration() -> None:
            torch.autograd.backward(net(torch.randn(5, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()

        return Training(net, optimizer, iteration)

    return factory


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def _adversaries(order: int) -> Training:
    """Two models whose parameters have the same names and other shapes, each with its optimizer."""
    torch.manual_seed(0)
    generator, critic = _net(4), _net(1)
    of_generator, of_critic = _adam(generator.parameters()), _adam(critic.parameters())

    def iteration() -> None:
        of_critic.zero_grad()
        torch.autograd.backward(critic(generator(torch.randn(5, 4)).detach()).sum())
        of_critic.step()
        of_generator.zero_grad()
        torch.autograd.backward(critic(generator(torch.randn(5, 4))).square().sum())
        of_generator.step()

    models, optimizers = [generator, critic][::order], [of_generator, of_critic][::order]
    return Training(models, optimizers, iteration)


def _together() -> Training:
    """The same two in one optimizer."""
    torch.manual_seed(0)
    one, other = _net(4), _net(1)
    optimizer = _adam([*one.parameters(), *other.parameters()])

    def iteration() -> None:
        torch.autograd.backward(other(one(torch.randn(5, 4))).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    return Training([one, other], optimizer, iteration)


def _averaging() -> Training:
    """A buffer that is another tensor after each forward."""

    class Averaging(nn.Module):
        average: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = _net()
            self.register_buffer("average", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.net(x)
            self.average = 0.9 * self.average + y.detach().mean(0)
            return y - self.average

    torch.manual_seed(0)
    net = Averaging()
    optimizer = _adam(net.parameters())

    def iteration() -> None:
        torch.autograd.backward(net(torch.randn(5, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    return Training(net, optimizer, iteration)


def _counting() -> Training:
    """A fused Adam, whose steps a schedule has: on CUDA its kernels read them. They are replaced in each iteration."""
    made = _of(lambda parameters: torch.optim.Adam(parameters, lr=0.05, fused=True))()
    (optimizer,) = made.optimizers

    def iteration() -> None:
        made.iteration()
        for state in optimizer.state.values():
            state["step"] = state["step"].clone()

    return Training(made.model, made.optimizer, iteration)


def _reformed() -> Training:
    """A weight whose memory format the training changes at its fifth iteration."""
    made = _of(_adam)()
    done: list[int] = []
    weight = next(made.models[0].parameters())

    def iteration() -> None:
        done.append(1)
        if len(done) == 5:
            weight.data = weight.data.t().contiguous().t()
        made.iteration()

    return Training(made.model, made.optimizer, iteration)


ODD: dict[str, Callable[[], Training]] = {
    "shared": _of(Shared),
    "turning": _of(Turning),
    "replacing": _of(Replacing),
    "flat": _of(Flat),
    "tied": _of(Tied),
    "late": _of(Late),
    "lookahead": _of(lambda parameters: Lookahead(_adam(parameters))),
    "passing": _of(lambda parameters: Passing(_adam(parameters))),
    "passed lookahead": _of(lambda parameters: Passing(Lookahead(_adam(parameters)))),
    "adversaries": lambda: _adversaries(1),
    "adversaries, the other first": lambda: _adversaries(-1),
    "two models in one optimizer": _together,
    "averaging": _averaging,
    "counting": _counting,
    "reformed": _reformed,
}
