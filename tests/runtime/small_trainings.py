"""Small trainings of every kind that has to work."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from counted import Counted
from torch import nn
from torch.autograd import backward
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torn import Case

from checkflow.training import Training

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _batch(number: int, rows: int = 4, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, width, generator=generator), torch.randint(3, (rows,), generator=generator)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def plain(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model: nn.Module | None = None) -> Case:
    """Forward, backward, update."""
    net = model if model is not None else mlp()
    optimizer = make(list(net.parameters()))

    def iterate(number: int) -> None:
        x, y = _batch(number)
        backward(F.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


def sgd() -> Case:
    return plain(lambda ps: torch.optim.SGD(ps, lr=0.1))


def momentum() -> Case:
    return plain(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))


def adamw_looped() -> Case:
    return plain(lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False))


def adamw_foreach() -> Case:
    return plain(lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True, amsgrad=True))


def momentum_foreach() -> Case:
    """Two groups, of which one decays its weights: what is written twice is not the same in both."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": parameters[:2]},
            {"params": parameters[2:], "weight_decay": 0.1, "nesterov": True},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True)

    return plain(make)


def routed() -> Case:
    """Other parameters without a gradient each time, as experts that no token went to: other selections of tensors."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)

    def iterate(number: int) -> None:
        x, y = _batch(number)
        chosen = [expert for index, expert in enumerate(net) if number == 0 or (number * 7 + index) % 3]
        backward(F.cross_entropy(torch.stack([expert(x) for expert in chosen]).sum(0), y))
        optimizer.step()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


def now_and_then_foreach() -> Case:
    """The same update by other functions in two of three iterations, without a word."""
    case = plain(lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True))
    optimizer = case.training.optimizers[0]

    def iterate(number: int) -> None:
        optimizer.param_groups[0].update(foreach=number % 4 < 2, fused=number % 4 == 2)
        case.iterate(number)

    return Case(case.training, iterate)


def meddling() -> Case:
    """A user's hook writes weights between the guard before the update and the functions in it."""
    case = plain(lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True))
    optimizer = case.training.optimizers[0]

    def iterate(number: int) -> None:
        def meddle(*_: object) -> None:
            if number > 3:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].mul_(0.9)

        hook = optimizer.register_step_pre_hook(meddle)
        case.iterate(number)
        hook.remove()

    return Case(case.training, iterate)


def raising() -> Case:
    """A closure that raises in every other update, which then is made without one."""
    case = plain(lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, foreach=True))
    optimizer = case.training.optimizers[0]

    def fails() -> float:
        raise ArithmeticError

    def iterate(number: int) -> None:
        if number % 2:
            with contextlib.suppress(ArithmeticError):
                optimizer.step(fails)
        case.iterate(number)

    return Case(case.training, iterate)


def adamw_fused() -> Case:
    return plain(lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True))


def counted() -> Case:
    """An optimizer that keeps numbers and tensors under a text, some from its first update on."""
    return plain(Counted)


def accumulating() -> Case:
    """One to three micro-batches, another count in each iteration."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def iterate(number: int) -> None:
        for micro in range(1 + number % 3):
            x, y = _batch(10 * number + micro)
            backward(F.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


class Tied(nn.Module):
    """Two names of one weight, and a weight that is trained through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(x)))
        return out


def tied() -> Case:
    net = Tied()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def iterate(number: int) -> None:
        x = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(number))
        backward(F.cross_entropy(net(x).flatten(0, 1), x.flatten()))
        optimizer.step()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


def frozen() -> Case:
    """Parameters without gradients, some of them given to the optimizer."""
    net = mlp()
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    return plain(lambda ps: torch.optim.AdamW(ps, lr=0.01), net)


def in_backward() -> Case:
    """Each parameter is updated as soon as its gradient is there."""
    net = mlp()
    optimizers = {p: torch.optim.AdamW([p], lr=0.01, foreach=False) for p in net.parameters()}

    def update(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def iterate(number: int) -> None:
        x, y = _batch(number)
        backward(F.cross_entropy(net(x), y))

    return Case(Training(net, list(optimizers.values()), lambda: None), iterate)


def recomputing() -> Case:
    """Activation checkpointing: the backward pass runs parts of the forward again."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def iterate(number: int) -> None:
        x, y = _batch(number)
        hidden = checkpoint(net[:3], x, use_reentrant=False)
        backward(F.cross_entropy(net[3:](hidden), y))
        optimizer.step()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


def adversarial() -> Case:
    """Two models with an optimizer each; the second is updated in every other iteration."""
    first, second = mlp(), mlp()
    one, two = torch.optim.Adam(first.parameters(), lr=0.01), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.5)

    def iterate(number: int) -> None:
        x, y = _batch(number)
        backward(F.cross_entropy(first(x), y))
        one.step()
        one.zero_grad()
        if number < 2 or number % 2:
            backward(F.cross_entropy(second(x), y))
            two.step()
            two.zero_grad()

    return Case(Training([first, second], [one, two], lambda: None), iterate)


def evaluating() -> Case:
    """An eval loop after some iterations, and a forward in train mode without gradients."""
    case = adamw_looped()
    net = case.training.models[0]

    def iterate(number: int) -> None:
        if number > 2 and number % 2:
            net.eval()
            with torch.no_grad():
                net(_batch(99)[0])
            net.train()
            with torch.no_grad():
                net(_batch(98)[0])
        case.iterate(number)

    return Case(case.training, iterate)


def clipping() -> Case:
    """Gradient clipping and a learning-rate scheduler; the last iteration's gradients are kept."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def iterate(number: int) -> None:
        optimizer.zero_grad()
        x, y = _batch(number)
        backward(F.cross_entropy(net(x), y))
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        scheduler.step()

    return Case(Training(net, optimizer, lambda: None), iterate)


def skipping() -> Case:
    """GradScaler: the first update and every third are skipped."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def iterate(number: int) -> None:
        x, y = _batch(number)
        loss = F.cross_entropy(net(x), y)
        scaled = scaler.scale(loss * (float("inf") if number % 3 == 2 else 1.0))
        backward(scaled)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


def averaging() -> Case:
    """A moving average of the weights, which no optimizer owns."""
    net = mlp()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def iterate(number: int) -> None:
        x, y = _batch(number)
        backward(F.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)

    return Case(Training([net, average], optimizer, lambda: None), iterate)


def reloading() -> Case:
    """The optimizer, a trained layer and a frozen one are loaded again right after some iterations."""
    case = frozen()
    net, optimizer = case.training.models[0], case.training.optimizers[0]
    weights = {name: torch.randn_like(tensor) for name, tensor in net[0].state_dict().items()}  # type: ignore[index]

    def iterate(number: int) -> None:
        if number > 1 and number % 3 == 0:
            net[0].load_state_dict({name: tensor + number for name, tensor in weights.items()})  # type: ignore[index]
            optimizer.load_state_dict(optimizer.state_dict())
        if number > 1 and number % 3 == 1:
            net[4].load_state_dict({n: 0.9 * t for n, t in net[4].state_dict().items()})  # type: ignore[index]
        case.iterate(number)

    return Case(case.training, iterate)


def convolutional() -> Case:
    """channels_last weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def iterate(number: int) -> None:
        x, y = _batch(number, width=32)
        backward(F.cross_entropy(net(x.view(4, 2, 4, 4)), y))
        optimizer.step()
        optimizer.zero_grad()

    return Case(Training(net, optimizer, lambda: None), iterate)


class Swapping(torch.optim.Optimizer):
    """Writes each new weight into a second tensor, and swaps the two; its average is another tensor each time."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.others = [torch.empty_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for parameter, other in zip(self.param_groups[0]["params"], self.others, strict=True):
            average = self.state[parameter].get("average", torch.zeros_like(parameter))
            self.state[parameter]["average"] = average * 0.9 + parameter.grad
            torch.sub(parameter.data, self.state[parameter]["average"], alpha=0.1, out=other)
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            parameter.data, self.others[index] = self.others[index], parameter.data


def parking() -> Case:
    """Each third iteration makes no update but takes another weight; the old one is written where no guard knows it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    weight = next(net.parameters())
    spare = [weight.detach().clone()]
    case = plain(lambda ps: torch.optim.SGD(ps, lr=0.1), net)

    def iterate(number: int) -> None:
        if number % 3 == 2:
            weight.data, spare[0] = spare[0], weight.data
            return
        spare[0].data.fill_(number)
        case.iterate(number)

    return Case(case.training, iterate)


def swapping() -> Case:
    return plain(Swapping)


def taking_turns() -> Case:
    """From the fourth iteration on an unused model's buffer is one of three tensors in turn; no counter sees writes."""
    net, unused = mlp(), nn.Module()
    unused.register_buffer("still", torch.zeros(5))
    turns = [torch.zeros(5), torch.zeros(5), torch.zeros(5)]
    case = plain(lambda ps: torch.optim.SGD(ps, lr=0.1), net)

    def iterate(number: int) -> None:
        case.iterate(number)
        if number > 3:
            turns[number % 3].data.fill_(number)
            unused.still = turns[number % 3]

    return Case(Training([net, unused], case.training.optimizer, lambda: None), iterate)


class Turning(torch.optim.Optimizer):
    """From the fourth update on a basis is made anew each time, column-major or row-major."""

    updates = 0

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.updates += 1
        for parameter in self.param_groups[0]["params"]:
            state, columns = self.state[parameter], parameter.grad.reshape(len(parameter), -1)
            state.setdefault("basis", torch.eye(len(columns)) + 0.1).mul_(1.01)
            state.setdefault("still", torch.ones(len(columns), 3))
            if self.updates > 3:
                state["basis"] = torch.tanh(state["basis"]).t().contiguous()
                if self.updates % 3:
                    state["basis"] = state["basis"].t()
                    state["still"] = (state["still"] + 1).t().contiguous().t()
            parameter.sub_((state["basis"] @ columns).view_as(parameter), alpha=0.1)


class Spinning(torch.optim.SGD):
    """From the fourth update on a table is transposed where it is: same tensor, same bytes, another matrix."""

    updates = 0

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.updates += 1
        for parameter in self.param_groups[0]["params"]:
            table = self.state[parameter].setdefault("table", torch.arange(9.0).view(3, 3))
            if self.updates > 3:
                table.t_()
        super().step()


def spinning() -> Case:
    return plain(lambda ps: Spinning(ps, lr=0.1))


def turning() -> Case:
    return plain(Turning)


class Lookahead(torch.optim.Optimizer):
    """Slow weights, each third time, without Optimizer.__init__: no hook can be placed. No counter sees its writes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.updates = optimizer, 0
        self.state = defaultdict(dict)
        for parameter in optimizer.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.updates += 1
        if self.updates % 3 == 0:
            for parameter, state in self.state.items():
                state["slow"].data.lerp_(parameter.data, 0.5)
                parameter.data.copy_(state["slow"])


class HookedLookahead(Lookahead):
    """The same with hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.defaults = {}
        torch.optim.Optimizer.__setstate__(self, {})


def wrapping() -> Case:
    return plain(lambda ps: Lookahead(torch.optim.AdamW(ps, lr=0.01)))


def hooked_wrapping() -> Case:
    return plain(lambda ps: HookedLookahead(torch.optim.AdamW(ps, lr=0.01)))


ALL = [
    sgd, momentum, adamw_looped, adamw_foreach, momentum_foreach, routed, now_and_then_foreach, raising, adamw_fused,
    accumulating, tied, frozen, in_backward, recomputing,
    adversarial, evaluating, clipping, skipping, averaging, reloading, convolutional,
    swapping, parking, turning, spinning, wrapping, hooked_wrapping, counted,
]  # fmt: skip
