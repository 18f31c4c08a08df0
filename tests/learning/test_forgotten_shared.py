"""What classes, functions and modules of a script carry is named as what its variables do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import shared_state
import torch
from test_forgotten import lacking, until_recorded
from torch import Tensor, nn, optim

import checkflow

CARRIED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "module": (lambda out: shared_state.deviation(out), "mean"),
    "class": (lambda out: shared_state.Means.deviation(out), "replaced"),
    "object": (shared_state.Means().moved, "written"),
    "function": (shared_state.scale, "kept"),
    "none": (shared_state.static, ""),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_what_code_itself_carries_is_named_in_a_loop_that_runs(tmp_path: Path, kind: str) -> None:
    """Only that which this loop uses."""
    loss, name = CARRIED[kind]
    model, told = nn.Linear(6, 3), list[str]()
    sgd = optim.SGD(model.parameters(), 0.01)

    def iterate(number: int) -> None:
        torch.autograd.backward(loss(model(torch.ones(4, 6) * number)))
        sgd.step()
        sgd.zero_grad()

    with checkflow.attach(model, sgd, store=tmp_path / "store", notify=told.append) as ckpt:
        until_recorded(ckpt, iterate)
    lines = lacking(told)
    assert len(lines) == bool(name), lines
    if name:
        assert lines[0].partition(" ")[0].endswith(f".{name}") and "shared_state.py:" in lines[0]
