"""Optimizers of other packages, each on the same small net."""

from __future__ import annotations

from collections.abc import Callable

import adam_atan2_pytorch
import came_pytorch
import dadaptation
import lion_pytorch
import prodigyopt
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn

import checkflow
from third_parties.case import Case, named, trained


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 10),
    )  # fmt: skip


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(10, (4,)))


def build(kind: Callable[..., torch.optim.Optimizer], settings: dict[str, object]) -> checkflow.Training:
    torch.manual_seed(0)
    model = net()
    optimizer = kind(model.parameters(), **settings)
    train = getattr(optimizer, "train", None)
    if train is not None:
        train()  # schedule-free ones hold two points
    return trained(model, lambda: loss_of(model), optimizer)


def collected(name: str, settings: dict[str, object]) -> checkflow.Training:
    """Of the package pytorch_optimizer."""
    return build(pytorch_optimizer.load_optimizer(name), settings)


def lookahead() -> checkflow.Training:
    torch.manual_seed(0)
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return trained(model, lambda: loss_of(model), pytorch_optimizer.Lookahead(inner))


CASES: tuple[Case, ...] = (
    *named(
        build,
        lion=(lion_pytorch.Lion, {"lr": 1e-4}),
        adamw_schedule_free=(schedulefree.AdamWScheduleFree, {"lr": 1e-3, "warmup_steps": 3}),
        sgd_schedule_free=(schedulefree.SGDScheduleFree, {"lr": 1e-2}),
        dadapt_adam=(dadaptation.DAdaptAdam, {"lr": 1.0}),
        dadapt_sgd=(dadaptation.DAdaptSGD, {"lr": 1.0}),
        prodigy=(prodigyopt.Prodigy, {"lr": 1.0}),
        came=(came_pytorch.CAME, {"lr": 1e-3, "betas": (0.9, 0.999, 0.9999)}),
        adam_atan2=(adam_atan2_pytorch.AdamAtan2, {"lr": 1e-3}),
    ),
    *named(
        collected,
        adabelief=("adabelief", {"lr": 1e-3}),
        adan=("adan", {"lr": 1e-3}),
        adafactor=("adafactor", {"lr": 1e-3}),
        adamp=("adamp", {"lr": 1e-3}),
        adopt=("adopt", {"lr": 1e-3}),
        lamb=("lamb", {"lr": 1e-3}),
        lars=("lars", {"lr": 1e-2}),
        madgrad=("madgrad", {"lr": 1e-3}),
        novograd=("novograd", {"lr": 1e-3}),
        ranger=("ranger", {"lr": 1e-3}),
        radam=("radam", {"lr": 1e-3}),
        tiger=("tiger", {"lr": 1e-4}),
        yogi=("yogi", {"lr": 1e-3}),
        shampoo=("shampoo", {"lr": 1e-3}),
        soap=("soap", {"lr": 1e-3}),
        ademamix=("ademamix", {"lr": 1e-3}),
    ),
    Case("lookahead", lookahead),
)
