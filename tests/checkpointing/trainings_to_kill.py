"""Four trainings with any of twelve optimizers, each run as a process of its own to be killed.

    python trainings_to_kill.py reference WHAT ITERATIONS
    python trainings_to_kill.py attached WHAT ITERATIONS SCHEDULE STORE SLOTS
    python trainings_to_kill.py paced WHAT ITERATIONS SCHEDULE STORE SLOTS

WHAT is TRAINING/OPTIMIZER, or TRAINING/OPTIMIZER/cuda. With "paced" the interval changes now and then, to LONGEST at
most, as `attach(overhead=...)` has it. It says what trainer_to_kill.py says.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
import trainer_to_kill
from torch import nn
from torch.optim import lr_scheduler

import checkflow
from checkflow.models import gpt2

LONGEST = 4
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@dataclass
class Built:
    """A training with all that a checkpoint of it has."""

    training: checkflow.Training
    schedulers: list[lr_scheduler.LRScheduler]
    loader: checkflow.ResumableLoader[tuple[torch.Tensor, ...]] | None = None
    carried: dict[str, torch.Tensor] = field(default_factory=dict)

    def iterate(self) -> None:
        self.training.iteration()
        for scheduler in self.schedulers:
            scheduler.step()

    def digest(self) -> str:
        """Of all that is to be the same again."""
        content = hashlib.sha256()
        for model, optimizer, scheduler in zip(
            self.training.models, self.training.optimizers, self.schedulers, strict=True
        ):
            content.update(trainer_to_kill.digest(model, optimizer, scheduler).encode())
        for _, tensor in sorted(self.carried.items()):
            content.update(tensor.cpu().numpy().tobytes())
        return content.hexdigest()


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def _scheduled(*optimizers: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
    return [lr_scheduler.ExponentialLR(optimizer, 0.999) for optimizer in optimizers]


def net(make: Optimizer, device: str) -> Built:
    """BatchNorm, dropout, and a loader that shuffles."""
    model, _ = trainer_to_kill.build(device)
    optimizer, loader = make(model.parameters()), trainer_to_kill.batches()
    endlessly = trainer_to_kill.endless(loader, device)

    def iterate() -> None:
        x, y = next(endlessly)
        _update(optimizer, nn.functional.cross_entropy(model(x), y))

    return Built(checkflow.Training(model, optimizer, iterate), _scheduled(optimizer), loader)


def gpt(make: Optimizer, device: str) -> Built:
    """GPT-2 at a small size, its embedding tied; gradients are clipped."""
    model = gpt2.GPT2(gpt2.SMALL).to(device)
    optimizer = make(model.parameters())

    def iterate() -> None:
        tokens = torch.randint(gpt2.SMALL.vocabulary, (2, 17), device=device)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Built(checkflow.Training(model, optimizer, iterate), _scheduled(optimizer))


def gan(make: Optimizer, device: str) -> Built:
    """Two models, two optimizers, two updates in an iteration."""
    generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    critic = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1)).to(device)
    models, optimizers = [generator, critic], [make(generator.parameters()), make(critic.parameters())]
    judged = nn.functional.binary_cross_entropy_with_logits

    def iterate() -> None:
        made = generator(torch.randn(8, 16, device=device))
        true, false = critic(torch.randn(8, 32, device=device)), critic(made.detach())
        _update(optimizers[1], judged(true, torch.ones_like(true)) + judged(false, torch.zeros_like(false)))
        _update(optimizers[0], judged(critic(made), torch.ones_like(true)))

    return Built(checkflow.Training(models, optimizers, iterate), _scheduled(*optimizers))


def lstm(make: Optimizer, device: str) -> Built:
    """What it remembers goes from one iteration into the next."""
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 32, 2, dropout=0.1), "head": nn.Linear(32, 8)}).to(device)
    optimizer = make(model.parameters())
    carried = {name: torch.zeros(2, 4, 32, device=device) for name in ("hidden", "cell")}

    def iterate() -> None:
        x = torch.randn(6, 4, 8, device=device)
        out, (hidden, cell) = model["lstm"](x, (carried["hidden"], carried["cell"]))
        _update(optimizer, nn.functional.mse_loss(model["head"](out), x.roll(-1, 0)))
        carried["hidden"], carried["cell"] = hidden.detach(), cell.detach()

    training = checkflow.Training(model, optimizer, iterate, {"carried": carried})
    return Built(training, _scheduled(optimizer), carried=carried)


TRAININGS: dict[str, Callable[[Optimizer, str], Built]] = {"net": net, "gpt": gpt, "gan": gan, "lstm": lstm}


def build(what: str) -> Built:
    """Of TRAINING/OPTIMIZER, which may have a device behind it."""
    torch.manual_seed(3)
    training, optimizer, *device = what.split("/")
    return TRAININGS[training](OPTIMIZERS[optimizer], *device or ("cpu",))


def main(mode: str, what: str, iterations: int, schedule: str = "", store: str = "", slots: str = "3") -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else CUDA refuses what comes next
    torch.use_deterministic_algorithms(True)
    built = build(what)

    def say(iteration: int) -> None:
        print(f"at {iteration} {built.digest()}", flush=True)  # noqa: T201

    if mode == "reference":
        for i in range(iterations):
            built.iterate()
            say(i + 1)
        return
    training = built.training
    with checkflow.attach(
        training.model, training.optimizer, store=store, schedule=schedule, scheduler=built.schedulers,
        loader=built.loader, extra=training.extra, when_full="wait", slots=int(slots),
        notify=partial(print, file=sys.stderr),
    ) as ckpt:  # fmt: skip
        first = ckpt.restore()
        say(first)
        chance = random.Random(first)
        for i in range(first, iterations):
            built.iterate()
            if mode == "paced" and chance.random() < 0.2:
                ckpt._executor.pace(chance.randint(1, LONGEST))
            ckpt.step()
            say(i + 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
