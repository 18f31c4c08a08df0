"""What iterations without an update are told of: gradients that are added up across them, and another optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkflow


@pytest.mark.parametrize(
    ("each", "skipped", "in_place", "told"),
    [
        pytest.param("batch", (), False, 1, id="for each micro-batch"),
        pytest.param("update", (), False, 0, id="for each update"),
        pytest.param("update", (), True, 0, id="for each update, zeroed in place"),
        pytest.param("update", (2, 3), False, 0, id="some are skipped"),
        pytest.param("update", (0, 1, 5), False, 0, id="the first is skipped"),
        pytest.param("update", (2, 3), True, 1, id="some are skipped, and zeroed in place: told in vain"),
    ],
)
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_only_what_is_added_up_across_it_is_told_of(
    tmp_path: Path, each: str, skipped: tuple[int, ...], in_place: bool, told: int, zeroed: str
) -> None:
    """Three micro-batches for an update, dropped before it or after."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    said: list[str] = []
    with checkflow.attach(model, optimizer, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(8):
            if zeroed == "before":
                optimizer.zero_grad(set_to_none=not in_place)
            for part in range(3):
                torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
                if each == "batch" and part < 2:
                    ckpt.step()
            if number not in skipped:
                optimizer.step()
            if zeroed == "after":
                optimizer.zero_grad(set_to_none=not in_place)
            ckpt.step()
    lines = [line for line in said if "a resume goes on without them" in line]
    assert len(lines) == told and all("model/0.weight: its gradient was written to" in line for line in lines), said


@pytest.mark.parametrize("attached", [True, False])
def test_another_optimizer_than_the_attached_one_is_told_of(tmp_path: Path, attached: bool) -> None:
    """Put in its place in mid-run: its state would be in no checkpoint."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    first, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    said: list[str] = []
    with checkflow.attach(model, first, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(12):
            torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
            optimizer = first if attached or number < 4 else other
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    lines = [line for line in said if "where another one does, its state is in no checkpoint: attach that one" in line]
    assert len(lines) == (not attached) and all("model/0.weight: is written though" in line for line in lines), said
