"""A training of somebody else's parts, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import checkflow

PACKAGES = Path(__file__).parent / "packages"


@dataclass(frozen=True, slots=True)
class Case:
    """`build` draws a new training; its iteration draws its batch from torch's generator, so that a resume needs it."""

    name: str
    build: Callable[[], checkflow.Training]


def modules() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PACKAGES.glob("[a-z]*.py")))


def cases_of(module: str) -> tuple[Case, ...]:
    """Raises ImportError where its package is not installed."""
    found: tuple[Case, ...] = importlib.import_module(f"third_parties.packages.{module}").CASES
    return found


def case(module: str, name: str) -> Case:
    return next(each for each in cases_of(module) if each.name == name)


def trained(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> checkflow.Training:
    """One optimizer, AdamW unless given, and one backward pass."""
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer

    def iteration() -> None:
        torch.autograd.backward(loss())
        chosen.step()
        chosen.zero_grad()

    return checkflow.Training(model, chosen, iteration)


def classifier(model: nn.Module, size: int, channels: int = 3, classes: int = 10, batch: int = 2) -> checkflow.Training:
    """Random images of random classes."""

    def loss() -> Tensor:
        images, labels = torch.randn(batch, channels, size, size), torch.randint(classes, (batch,))
        return nn.functional.cross_entropy(model(images), labels)

    return trained(model, loss)


def named(build: Callable[..., checkflow.Training], **rows: tuple[object, ...]) -> tuple[Case, ...]:
    """One case a row: its name, and what `build` is given."""
    return tuple(Case(name, partial(build, *row)) for name, row in rows.items())
