"""Ctrl-C within step(), in a notebook: the loop goes on, and so do its checkpoints."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import checkflow

OURS = str(Path(checkflow.__file__).parent)
TIMES = 150
SPREAD = 700  # lines: more than a step has


class Interrupt:
    """Ctrl-C at a line of checkflow's own code, in this thread."""

    def __init__(self, after_lines: int) -> None:
        self._left = after_lines
        self.is_raised = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _of: object) -> object:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, _frame: FrameType, event: str, _of: object) -> object:
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.is_raised:
                self.is_raised = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._line


@pytest.mark.parametrize("policy", ["checkflow", "rolling"])
@pytest.mark.parametrize("width", [8, 400], ids=["copied at once", "copied by the thread"])
def test_whatever_is_interrupted_the_next_checkpoints_are_made(tmp_path: Path, policy: str, width: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    choose, raised = random.Random(0), 0
    with checkflow.attach(
        model, optimizer, store=tmp_path, policy=policy, notify=lambda _: None, tell=lambda _: None
    ) as ckpt:

        def iterate() -> None:
            torch.autograd.backward(model(torch.randn(2, width)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        for time in range(TIMES):
            iterate()
            try:
                with Interrupt(choose.randrange(SPREAD)) as interrupt:
                    ckpt.step()
            except KeyboardInterrupt:
                assert interrupt.is_raised
                raised += 1
            for _ in range(3):
                iterate()
                ckpt.step()
            if time % 10 == 9:
                ckpt._executor.drain()
                staged = ckpt.status().staged_iteration
                assert staged is not None and staged >= ckpt._executor.completed - 3
        for _ in range(3):
            iterate()
            ckpt.step()
        ckpt.save()
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        saved = ckpt._executor.completed
    assert raised > TIMES / 2
    again = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    with checkflow.attach(
        again, torch.optim.AdamW(again.parameters()), store=tmp_path, notify=lambda _: None, tell=lambda _: None
    ) as ckpt:
        assert ckpt.restore() == saved
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), expected, strict=True))
