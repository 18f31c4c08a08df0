"""What wrappers and communication hooks keep for themselves: attach tells of it, unless it is listed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import checkflow
from checkflow.extra import Variables


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def told(store: Path, model: torch.nn.Module, optimizer: Any, extra: dict[str, object]) -> list[str]:
    found: list[str] = []
    with checkflow.attach(model, optimizer, store=store, extra=extra, notify=found.append, tell=lambda _: None):
        return found


def test_what_an_averaging_optimizer_counts(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with warnings.catch_warnings(action="ignore"):  # torch's own imports warn of what torch deprecates
        kind = importlib.import_module("torch.distributed.optim").PostLocalSGDOptimizer
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=4, warmup_steps=3)
    optimizer = kind(inner, averager)
    (line,) = told(tmp_path / "a", model, optimizer, {})
    assert line.startswith("PostLocalSGDOptimizer: its state_dict() has 'step' beside what the optimizer in it has")
    assert line.endswith('list it: attach(extra={"own": optimizer})')
    averager.step = 7
    extra: dict[str, object] = {"own": Variables(vars(averager), "step")}
    with checkflow.attach(model, optimizer, store=tmp_path / "b", extra=extra, tell=lambda _: None) as checkpointer:
        checkpointer.step()
    averager.step = 0
    with checkflow.attach(model, optimizer, store=tmp_path / "b", extra=extra, tell=lambda _: None) as checkpointer:
        assert checkpointer.restore() == 1
    assert averager.step == 7
    assert not told(tmp_path / "c", model, optimizer, extra)
    assert not told(tmp_path / "d", model, inner, {})


class Kept:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


def test_what_a_communication_hook_keeps(tmp_path: Path) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not told(tmp_path / "a", model, optimizer, {})
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    (line,) = told(tmp_path / "b", model, optimizer, {})
    assert line.startswith("model: what its communication hook keeps (PowerSGDState) is in no checkpoint")
    assert not told(tmp_path / "c", model, optimizer, {"hook": Kept(state)})


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_hook_keeps_of_a_wrapper_that_was_not_given(when: str, tmp_path: Path) -> None:
    """It is found in the variables of the loop, once; also where model or hook come after attach."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for listed in (False, True):
        found: list[str] = []
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1000)
        wrapped = DistributedDataParallel(model)
        other = DistributedDataParallel(torch.nn.Linear(2, 1))  # of no training that is attached
        other.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook)
        if when == "before":
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        given, extra = model if when == "before" else wrapped, {"hook": Kept(state)} if listed else {}
        store = tmp_path / str(listed)
        with checkflow.attach(
            given, optimizer, store=store, extra=extra, notify=found.append, tell=lambda _: None
        ) as ckpt:
            if when == "after":
                wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for _ in range(10):
                wrapped(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
        kept = [line.removeprefix(f"{store}: ") for line in found if "hook keeps" in line]
        expected = "wrapped: what its communication hook keeps (PowerSGDState)"
        assert [line.partition(" is in no")[0] for line in kept] == [expected] * (not listed)
