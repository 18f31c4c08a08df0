"""Parts and shapes that training changes after attach: what is said of them then, and when it is restored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkflow
from checkflow.errors import InputError


class Observed(nn.Module):
    """As torch's observers do, it gives a buffer its shape in the first forward pass."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale.shape != (3,):
            self.scale = torch.ones(3)
        found: torch.Tensor = self.layer(x) * self.scale
        return found


class Lazy(nn.Module):
    """Its first forward pass makes a buffer."""

    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.scale = y.detach() if self.scale is None else self.scale * 0.9 + y.detach() * 0.1
        return y / (1 + self.scale)


def life(model: nn.Module, store: Path, iterations: int, **options: Any) -> list[str]:
    """What is told of, beside what is reported."""
    told: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * isinstance(model, Observed))
    options = {"notify": told.append, "tell": lambda _line: None} | options
    with checkflow.attach(model, optimizer, store=store, **options) as ckpt:
        for iteration in range(ckpt.restore(), iterations):
            if iteration == 2 and isinstance(model, nn.Sequential):
                model[1] = nn.Linear(3, 5)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            torch.autograd.backward(model(torch.ones(2, 3)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    return told


def test_a_shape_that_the_first_forward_pass_makes_is_told_at_the_first_step_and_at_a_restore(tmp_path: Path) -> None:
    (line,) = life(Observed(), tmp_path, 1)
    assert "model/scale: had shape (1,) at attach, and has (3,) since the first iteration; " in line
    assert line.endswith("run one forward pass before attach")
    with pytest.raises(InputError, match=r"^model/scale: has shape \(1,\), \(3,\) in .*, run one before attach$"):
        life(Observed(), tmp_path, 2)
    model = Observed()
    model(torch.ones(2, 3))
    assert not life(model, tmp_path, 2)


def test_a_buffer_that_is_none_until_the_first_forward_pass_is_made_by_a_restore(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Lazy()
    whole, again = copy.deepcopy(model), copy.deepcopy(model)
    life(model, tmp_path / "parts", 2)
    life(again, tmp_path / "parts", 4)
    life(whole, tmp_path / "whole", 4)
    assert again.state_dict().keys() == whole.state_dict().keys() >= {"scale"}
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))


def test_what_training_adds_is_to_be_added_before_a_restore(tmp_path: Path) -> None:
    life(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path, 1)
    with pytest.raises(InputError, match=r"add what it had at iteration 1 and call restore\(\) again$"):
        life(nn.Sequential(nn.Linear(3, 3)), tmp_path, 2)


def test_a_part_of_another_size_is_attached_anew(tmp_path: Path) -> None:
    """No schedule was given, so that nothing is said of one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    said = r"model/1\.weight: has shape \(5, 3\), and had \(4, 3\); make such a change before attach: close, and attach"
    with pytest.raises(InputError, match=said):
        life(model, tmp_path, 4)
    life(model, tmp_path, 2, start_over=True)
