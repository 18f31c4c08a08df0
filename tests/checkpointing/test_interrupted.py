"""Ctrl-C within step(), in a notebook, or what a time-out raises: the loop goes on, and so do its checkpoints."""

from __future__ import annotations

import contextlib
import dis
import inspect
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_attach import compiled, same, small, weights

import checkflow
from checkflow.checkpointing.engine import Engine
from checkflow.runtime.executor import Executor
from checkflow.store.format.reader import list_checkpoints

OURS = str(Path(checkflow.__file__).parent)
TIMES = 150
SPREAD = 700  # lines: more than a step has
STEP = checkflow.Checkpointer.step
LINES, FIRST = inspect.getsourcelines(STEP)
COUNTS = FIRST + next(number for number, line in enumerate(LINES) if "before[0] + 1" in line)


class Interrupt:
    """A signal at a line of checkflow's own code, in this thread; not where Python runs no handler of one."""

    def __init__(self, after_lines: int, number: signal.Signals = signal.SIGINT) -> None:
        self._left = after_lines
        self._number = number
        self.is_raised = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _of: object) -> object:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, _of: object) -> object:
        if event == "line" and not (frame.f_code is STEP.__code__ and frame.f_lineno <= COUNTS):
            self._left -= 1
            if self._left < 0 and not self.is_raised:
                self.is_raised = True
                sys.settrace(None)
                signal.raise_signal(self._number)
        return self._line


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM], ids=["Ctrl-C", "time-out"])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Of a signal whose handler raises."""

    def expired(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError("time is over")

    found: signal.Signals = request.param
    before = signal.getsignal(found)
    if found is not signal.SIGINT:
        signal.signal(found, expired)
    yield found
    signal.signal(found, before)


@pytest.mark.parametrize("policy", ["checkflow", "rolling"])
@pytest.mark.parametrize("width", [8, 400], ids=["copied at once", "copied by the thread"])
def test_whatever_is_interrupted_the_next_checkpoints_are_made(
    tmp_path: Path, policy: str, width: int, number: signal.Signals
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    choose, raised = random.Random(0), 0
    with checkflow.attach(
        model, optimizer, store=tmp_path, policy=policy, notify=lambda _: None, tell=lambda _: None
    ) as ckpt:
        made = 0

        def iterate() -> None:
            nonlocal made
            assert ckpt._executor.completed == made
            torch.autograd.backward(model(torch.randn(2, width)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            made += 1

        for time in range(TIMES):
            iterate()
            try:
                with Interrupt(choose.randrange(SPREAD), number) as interrupt:
                    ckpt.step()
            except (KeyboardInterrupt, TimeoutError):
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
    assert raised > TIMES / 2 and saved == made
    again = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    with checkflow.attach(
        again, torch.optim.AdamW(again.parameters()), store=tmp_path, notify=lambda _: None, tell=lambda _: None
    ) as ckpt:
        assert ckpt.restore() == saved
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), expected, strict=True))


def test_no_handler_runs_before_an_iteration_is_counted() -> None:
    """Python runs them where a function begins, at calls, and where a loop goes back."""
    before = [each for each in dis.get_instructions(STEP) if each.positions and (each.positions.lineno or 0) <= COUNTS]
    assert {"STORE_ATTR", "RESUME"} <= {each.opname for each in before}
    assert not [each.opname for each in before if "CALL" in each.opname or "BACKWARD" in each.opname]
    read = [each.argval for each in before if each.opname == "LOAD_ATTR"]
    kinds = (checkflow.Checkpointer, Engine, Executor)
    assert not [name for name in read if any(isinstance(getattr(kind, name, None), property) for kind in kinds)]


@pytest.mark.parametrize("way", ["schedule", "learning", "rolling"])
def test_whatever_is_interrupted_each_iteration_is_counted_once(tmp_path: Path, way: str) -> None:
    """At each of the first lines, and at some of the others. What is saved right after it, and later, is right."""
    training, told, wanted, made = small(), list[str](), dict[int, dict[str, torch.Tensor]](), 0
    options: dict[str, Any] = {"schedule": compiled(small, interval=2)} if way == "schedule" else {}
    options |= {"policy": "rolling"} if way == "rolling" else {}
    with checkflow.attach(
        training.model, training.optimizer, store=tmp_path, notify=told.append, tell=lambda _: None, **options
    ) as ckpt:

        def iterate(interrupt: Interrupt | None = None) -> None:
            nonlocal made
            training.iteration()
            made += 1
            wanted[made] = weights(training)
            try:
                with interrupt or contextlib.nullcontext():
                    ckpt.step()
            except KeyboardInterrupt:
                assert interrupt is not None and interrupt.is_raised
            assert ckpt._executor.completed == made

        for turn, position in enumerate((*range(150), *range(150, SPREAD, 7))):
            iterate(Interrupt(position))
            if turn % 5 == 0:
                ckpt.save(keep=False)
                assert ckpt.status().durable_iteration == made
            for _ in range(turn % 4):
                iterate()
            if turn % 7 == 0 and made > 2:
                made = ckpt.restore()
                assert same(weights(training), wanted[made])
    assert list_checkpoints(tmp_path)[0].iteration == made


def test_a_handler_that_saves_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    """It would wait for itself. Between steps it saves, and afterwards the loop goes on as before."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    choose, refused, saved = random.Random(0), list[str](), 0
    with checkflow.attach(model, optimizer, store=tmp_path, notify=lambda _: None, tell=lambda _: None) as ckpt:

        def save(_number: int, _frame: FrameType | None) -> None:
            nonlocal saved
            try:
                ckpt.save()
                saved += 1
            except checkflow.InputError as error:
                refused.append(str(error))

        before = signal.signal(signal.SIGUSR1, save)
        try:
            for _ in range(TIMES):
                torch.autograd.backward(model(torch.randn(2, 8)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                with Interrupt(choose.randrange(SPREAD // 2), signal.SIGUSR1):
                    ckpt.step()
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert saved and ckpt.status().durable_iteration == TIMES
    assert len(refused) > TIMES / 4
    assert any("as a signal's handler does" in line for line in refused)
