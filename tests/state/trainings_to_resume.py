"""Trainings whose interrupted and uninterrupted runs have to end bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from counted import Counted
from torch import nn
from torch.optim import lr_scheduler as lrs

from checkflow.state.host.objects import HostObjects
from checkflow.training import Training


@dataclass
class Run:
    """A training under way: `steps` yields after each iteration, forever."""

    training: Training
    objects: HostObjects
    steps: Iterator[None]
    seen: list[torch.Tensor] = field(default_factory=list)  # losses and batches since this run began


Make = Callable[[], Run]
Scheduler = Callable[[torch.optim.Optimizer], lrs.LRScheduler | list[lrs.LRScheduler]]


def _nothing() -> None:
    """Training.iteration, which only a trace calls."""


class Small(nn.Module):
    """Convolution, BatchNorm, dropout and a head: state of every kind, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(F.relu(self.norm(self.conv(x))))
        return torch.as_tensor(self.head(hidden.flatten(1)))


class Tied(nn.Module):
    """Embedding and output share their weight; a bias is frozen; a counter changes without an optimizer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight
        self.out.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls += 1
        return torch.as_tensor(self.out(torch.tanh(self.body(self.embed(x[:, 0, 0, :4].abs().long() % 7)))).mean(1))

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls}

    def set_extra_state(self, state: object) -> None:
        assert isinstance(state, dict)
        self.calls = state["calls"]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Drawn from the global generators: NumPy's decides the labels."""
    return torch.randn(4, 3, 6, 6), torch.from_numpy(np.random.randint(0, 5, 4))


def simple(
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Scheduler | None = None,
    *,
    model: Callable[[], nn.Module] = Small,
    accumulate: Sequence[int] = (1,),
    scale: float | None = None,
) -> Run:
    """One model and optimizer; `accumulate`: micro-batches of an iteration, drawn; `scale`: a GradScaler's first."""
    net = model()
    opt = optimizer([p for p in net.parameters() if p.requires_grad])
    made = scheduler(opt) if scheduler is not None else None
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3) if scale is not None else None
    schedulers: list[lrs.LRScheduler] = made if isinstance(made, list) else [] if made is None else [made]
    objects = HostObjects.of(scheduler=schedulers, scaler=scaler, metadata={"run": "test"})
    run = Run(Training(net, opt, _nothing), objects, iter(()))

    def steps() -> Iterator[None]:
        while True:
            parts = accumulate[int(torch.randint(len(accumulate), ()))]
            loss = torch.zeros(())
            for _ in range(parts):
                x, y = batch()
                if isinstance(net, Small):
                    x = x.to(memory_format=torch.channels_last)
                loss = F.cross_entropy(net(x), y)
                (scaler.scale(loss) if scaler is not None else loss).backward()  # type: ignore[no-untyped-call]
            if scaler is not None:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            opt.zero_grad()
            for item in schedulers:
                item.step(loss.item()) if isinstance(item, lrs.ReduceLROnPlateau) else item.step()
            run.seen.append(loss.detach())
            yield

    run.steps = steps()
    return run


def gan() -> Run:
    """Two models, two optimizers, a generator of the user's own, and an optimizer with two groups."""
    inner, outer, two = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 1)
    one = nn.Sequential(inner, nn.Dropout(0.1), outer)
    first = torch.optim.AdamW(inner.parameters())
    first.add_param_group({"params": list(outer.parameters()), "lr": 0.1})
    second = torch.optim.SGD(two.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    noise = torch.Generator().manual_seed(4)
    schedulers = (lrs.StepLR(first, 2), lrs.ExponentialLR(second, 0.9))
    objects = HostObjects.of(scheduler=schedulers, generators={"noise": noise})
    run = Run(Training([one, two], [first, second], _nothing), objects, iter(()))

    def steps() -> Iterator[None]:
        while True:
            loss = two(one(torch.randn(4, 6, generator=noise))).square().mean()
            loss.backward()
            first.step()
            schedulers[0].step()
            if schedulers[0].last_epoch % 2:  # every other iteration
                second.step()
                schedulers[1].step()
            first.zero_grad()
            second.zero_grad()
            run.seen.append(loss.detach())
            yield

    run.steps = steps()
    return run


def in_turns(*, first: bool, to_none: bool) -> Run:
    """Layers of which an iteration uses some; gradients are dropped or zeroed, `first` or last in it."""
    layers = nn.ModuleList([nn.Linear(4, 4), *(nn.Linear(4, 2) for _ in range(3))])
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    scheduler = lrs.StepLR(optimizer, 100)
    run = Run(Training([layers], [optimizer], _nothing), HostObjects.of(scheduler=scheduler), iter(()))

    def steps() -> Iterator[None]:
        while True:
            if first:
                optimizer.zero_grad(set_to_none=to_none)
            done, x = scheduler.last_epoch, layers[0](torch.randn(5, 4))
            used = [layers[1 + done % 3]] if done else layers[1:]  # the first gives each its state
            loss = torch.stack([layer(x).square().mean() for layer in used]).sum()
            torch.autograd.backward(loss)
            optimizer.step()
            if not first:
                optimizer.zero_grad(set_to_none=to_none)
            scheduler.step()
            run.seen.append(loss.detach())
            yield

    run.steps = steps()
    return run


def lbfgs() -> Run:
    """State in lists that grow, held by the first parameter alone, and None among it."""
    net = nn.Linear(3, 3)
    opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2, history_size=3)
    run = Run(Training(net, opt, _nothing), HostObjects.of(), iter(()))

    def steps() -> Iterator[None]:
        while True:
            x = torch.randn(5, 3)

            def closure(x: torch.Tensor = x) -> float:
                opt.zero_grad()
                loss = (net(x) - x.sin()).square().mean()
                torch.autograd.backward(loss)
                return float(loss.detach())

            run.seen.append(torch.tensor(opt.step(closure)))  # type: ignore[no-untyped-call]
            yield

    run.steps = steps()
    return run


def channels_last() -> nn.Module:
    return Small().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def adamw(
    *, foreach: bool | None = None, fused: bool | None = None, amsgrad: bool = False
) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=foreach, fused=fused, amsgrad=amsgrad)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def in_groups(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """By what is decayed and what is not, and what has five dimensions, which is nothing."""
    dims = ([2, 3, 4], [0, 1], [5])
    return torch.optim.AdamW([{"params": [p for p in parameters if p.dim() in some], "lr": 0.01} for some in dims])


class EarlierSWALR(torch.optim.swa_utils.SWALR):
    """As before torch 2.10: its state has the function that its constructor chose."""

    def state_dict(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key not in ("optimizer", "_anneal_strategy")}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        vars(self).update(state_dict)


SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda _: 0.9),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=30),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "polynomial": lambda o: lrs.PolynomialLR(o, 10),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.5, anneal_epochs=4),
    "swa of torch 2.9": lambda o: EarlierSWALR(o, 0.5, anneal_epochs=4),
    "swa of torch 2.9, later": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), EarlierSWALR(o, 0.5)], [2]),
    "two": lambda o: [lrs.StepLR(o, 2), lrs.LinearLR(o)],
}

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd": sgd,
    "adamw looped": adamw(foreach=False),
    "adamw foreach": adamw(foreach=True),
    "adamw fused": adamw(fused=True),
    "adamw amsgrad": adamw(amsgrad=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
}

TRAININGS: dict[str, Make] = {
    **{name: lambda o=o: simple(o) for name, o in OPTIMIZERS.items()},  # type: ignore[misc]
    **{f"scheduler {name}": lambda s=s: simple(sgd, s) for name, s in SCHEDULERS.items()},  # type: ignore[misc]
    "tied": lambda: simple(adamw(), model=Tied),
    "bfloat16": lambda: simple(adamw(), model=lambda: Tied().to(torch.bfloat16)),
    "lbfgs": lbfgs,
    "channels_last": lambda: simple(adamw(fused=True), model=channels_last),
    "accumulation": lambda: simple(sgd, accumulate=(1, 3)),
    "scaler": lambda: simple(adamw(), scale=2.0**127),  # the first updates are skipped
    "scaler, fused": lambda: simple(adamw(fused=True), scale=2.0**127),
    "calm scaler": lambda: simple(adamw(), scale=2.0),
    "calm scaler, fused": lambda: simple(adamw(fused=True), scale=2.0),
    "several": gan,
    "in turns, zeroed first": lambda: in_turns(first=True, to_none=False),
    "in turns, zeroed last": lambda: in_turns(first=False, to_none=False),
    "in turns, dropped first": lambda: in_turns(first=True, to_none=True),
    "in turns, dropped last": lambda: in_turns(first=False, to_none=True),
    "counted": lambda: simple(Counted),
    "empty group": lambda: simple(in_groups),
}
