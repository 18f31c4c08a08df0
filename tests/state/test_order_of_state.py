"""An optimizer's dict of state comes back in the order in which it was made: a training may walk it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from test_parts import attached, begun, in_parts, lowdiff, nothing, rolling, small, traced
from trainings_to_resume import Run

import checkflow
from checkflow.graph import Graph
from checkflow.schedule import Schedule

LATE = [0, 2, 1]  # layers, by when each is first trained


def order(run: Run) -> list[int]:
    """Numbers of parameters."""
    (optimizer,) = run.training.optimizers
    numbers = {id(parameter): number for number, parameter in enumerate(optimizer.param_groups[0]["params"])}
    return [numbers[id(parameter)] for parameter in optimizer.state]


@pytest.mark.parametrize("parted", [in_parts, rolling, lowdiff])
def test_updates_that_are_made_again_leave_it(parted: Callable[[Graph, int], Schedule], tmp_path: Path) -> None:
    make = small(nothing)
    schedule, run = parted(traced(make), 3), begun(make)
    with attached(run, schedule, tmp_path, pytest.fail) as ckpt:
        ckpt.restore()
        for iteration in range(1, 10):
            next(run.steps)
            if iteration == 5:
                (optimizer,) = run.training.optimizers
                first = next(iter(optimizer.state))
                optimizer.state[first] = optimizer.state.pop(first)
            ckpt.step()
    found = order(run)
    assert found[-1] == 0 and sorted(found) != found
    again = begun(make)
    with attached(again, schedule, tmp_path, pytest.fail) as ckpt:
        assert ckpt.restore() == 9 and order(again) == found
        assert ckpt.restore(3) == 3 and order(again) == sorted(found)
        assert ckpt.restore(9) == 9 and order(again) == found


def noisy(store: Path | None, ends: int) -> dict[str, torch.Tensor]:
    """Draws for each state in turn. The weights."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in LATE)
    optimizer = torch.optim.AdamW(model.parameters())

    def iterate(number: int) -> None:
        torch.autograd.backward(model[LATE[number % len(LATE)]](torch.randn(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state["exp_avg"].add_(torch.randn_like(state["exp_avg"]), alpha=1e-3)

    if store is None:
        for number in range(ends):
            iterate(number)
    else:
        quiet = partial(checkflow.attach, notify=lambda _: None, tell=lambda _: None)
        with quiet(model, optimizer, store=store) as ckpt:
            for number in range(ckpt.restore(), ends):
                iterate(number)
                ckpt.step()
    return model.state_dict()


def test_a_training_that_walks_it_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    noisy(tmp_path, 7)
    resumed, whole = noisy(tmp_path, 12), noisy(None, 12)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
