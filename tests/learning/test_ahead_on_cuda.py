"""A loop that never waits for its GPU: its host is ahead, and each iteration has a checkpoint all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import checkflow
from checkflow.store.memory.trainer_slots import WhenFull

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, ROWS = 2048, 8192  # tens of milliseconds an iteration, for a copy of a few
LONG_S = 60.0


@pytest.mark.parametrize("when_full", ["skip", "wait"])
def test_a_schedule_is_learned_for_what_the_gpu_takes(when_full: WhenFull, tmp_path: Path) -> None:
    told = list[str]()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(ROWS, WIDTH, device="cuda")

    def iterate() -> None:
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    with checkflow.attach(
        model, optimizer, store=tmp_path / "store", interval=1, when_full=when_full,
        persist_every=checkflow.PersistEvery(iterations=10**6), tell=told.append, notify=told.append,
    ) as ckpt:  # fmt: skip
        deadline = time.monotonic() + LONG_S
        while ckpt.learning != "knowing" and time.monotonic() < deadline:
            iterate()
            ckpt.step()
        assert ckpt.stats().learned_in, told
        iteration_ns = ckpt.schedule.iteration_time_ns
        ckpt.save()
        before = ckpt.stats()
        began = time.monotonic()
        for _ in range(40):
            iterate()
            ckpt.step()
        torch.cuda.synchronize()
        took_ns = (time.monotonic() - began) * 1e9 / 40
        after = ckpt.stats()
    assert after.skipped == before.skipped, told
    assert 0.7 < iteration_ns / took_ns < 1.4
    assert after.stall_ns - before.stall_ns < 0.2 * 40 * took_ns
