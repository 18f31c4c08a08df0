"""Ctrl-C while a training is being closed, once or twice: this close() or the next one gives back all that it had."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interrupting import assert_nothing_is_left, interrupted_at, others, plain_saver

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.store.format.reader import list_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # as it should

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
MODEL = torch.nn.Linear(8, 8)

__all__ = ["others"]  # a fixture of every test here


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a test leaves to the collector warns within it, which is as it should."""
    yield
    gc.collect()


def trained(store: Path, iterations: int) -> Checkpointer:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    ckpt = checkflow.attach(
        MODEL, optimizer, store=store, start_over=True, interval=3, notify=lambda _: None, tell=lambda _: None
    )
    for _ in range(iterations):
        torch.autograd.backward(MODEL(torch.randn(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    return ckpt


def assert_is_closed(ckpt: Checkpointer, store: Path) -> None:
    """Where the interrupt came before anything was done, the next close() does it all."""
    ckpt.close()
    calls: dict[str, Callable[[], object]] = {"step": ckpt.step, "save": ckpt.save, "restore": ckpt.restore}
    for name, call in calls.items():
        with pytest.raises(checkflow.InputError, match=f"^{name}: is closed; attach again$"):
            call()
    assert_nothing_is_left(store)
    assert not MODEL._forward_pre_hooks


def test_an_interrupt_at_any_line_of_close_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the package that closing runs."""
    store = tmp_path / "store"
    monkeypatch.setattr(sys, "executable", str(plain_saver(tmp_path)))
    for _ in range(2):  # the first runs more, once
        ckpt = trained(store, 0)
        with interrupted_at() as lines:
            ckpt.close()
    every = range(1, lines[0] + 1)
    for line in every if NIGHTLY else sorted([*every[:20], *random.Random(0).sample(every[20:], 40)]):
        ckpt = trained(store, 0)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(line):
            ckpt.close()
        assert_is_closed(ckpt, store)


@pytest.mark.parametrize("seed", range(40 if NIGHTLY else 6))
def test_after_two_interrupts_the_last_iteration_is_durable(tmp_path: Path, seed: int) -> None:
    """Whatever they cut short: where the first ends the wait for the disk, the second comes while that is given up."""
    choose = random.Random(seed)
    ckpt = trained(tmp_path, 4)
    first = choose.randrange(1, 1200)
    with contextlib.suppress(KeyboardInterrupt), interrupted_at(first, first + choose.randrange(1, 300)):
        ckpt.close()
    assert_is_closed(ckpt, tmp_path)
    assert list_checkpoints(tmp_path)[0].iteration == 4


def test_interrupts_end_the_wait_for_a_saver_that_hangs(tmp_path: Path) -> None:
    """One for each wait, and whichever it is, nothing is left half done; the saver goes on when it can."""
    ckpt = trained(tmp_path, 4)
    saver = ckpt._handle.saver_pid
    assert saver is not None
    os.kill(saver, signal.SIGSTOP)
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_at(*range(500, 50000, 500)):  # waits have lines
            ckpt.close()
    finally:
        os.kill(saver, signal.SIGCONT)
    assert_is_closed(ckpt, tmp_path)
    assert list_checkpoints(tmp_path)[0].iteration == 4
