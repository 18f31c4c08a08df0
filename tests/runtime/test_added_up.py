"""Gradients that are added up across step(): no checkpoint has them, which is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkflow


@pytest.mark.parametrize(
    ("each", "skipped", "told"),
    [("batch", (), 1), ("update", (), 0), ("update", (2, 3), 0), ("update", (1, 2, 5), 0)],
    ids=["for each micro-batch", "for each update", "some are skipped", "the first is skipped"],
)
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_only_what_is_added_up_across_it_is_told_of(
    tmp_path: Path, each: str, skipped: tuple[int, ...], told: int, zeroed: str
) -> None:
    """Three micro-batches for an update, dropped before it or after."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    said: list[str] = []
    with checkflow.attach(model, optimizer, store=tmp_path, notify=said.append, tell=lambda _: None) as ckpt:
        for number in range(8):
            if zeroed == "before":
                optimizer.zero_grad()
            for part in range(3):
                torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
                if each == "batch" and part < 2:
                    ckpt.step()
            if number not in skipped:
                optimizer.step()
            if zeroed == "after":
                optimizer.zero_grad()
            ckpt.step()
    lines = [line for line in said if "a resume goes on without them" in line]
    assert len(lines) == told and all("model/0.weight: its gradient was written to" in line for line in lines), said
