"""step() within blocks of the caller's: what is recorded outlives the call, and leaves these blocks as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attach_learning import Loop, attached
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from checkflow.learning import learner
from checkflow.torch_internals import innermost_mode

MANY = 1000  # iterations: more than the learner ever waits
Block = Callable[[], AbstractContextManager[object]]


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A user's own mode."""

    def __torch_dispatch__(self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """The same above autograd."""

    def __torch_function__(self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


HARMLESS: dict[str, Block] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("cpu"),
    "dual_level": forward_ad.dual_level,
    "function mode": Called,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "record_function": lambda: torch.profiler.record_function("step"),
    "fork_rng": torch.random.fork_rng,
}
IN_THE_WAY: dict[str, Block] = {
    "torch.inference_mode()": torch.inference_mode,
    "_FlopCounterMode(), a dispatch mode": lambda: FlopCounterMode(display=False),
    "Seen(), a dispatch mode": Seen,
}


def train(tmp_path: Path, block_of: Callable[[int], AbstractContextManager[object]]) -> list[str]:
    """Until an iteration was recorded to be planned for, or that was given up: what was told."""
    loop, told = Loop(), list[str]()
    with attached(loop, tmp_path / "store", told, tell=lambda _: None) as ckpt:
        for number in range(MANY):
            loop.iterate(number)
            with block_of(number):
                ckpt.step()
            if told or ckpt.learning in ("planning", "planned", "knowing"):
                break
        for more in range(3):
            loop.iterate(more)
            ckpt.step()
    assert innermost_mode() is None
    assert torch.ones(2).add(1).tolist() == [2, 2]
    return told


@pytest.mark.parametrize("name", HARMLESS)
def test_one_that_leaves_dispatch_alone_is_recorded_in(tmp_path: Path, name: str) -> None:
    assert train(tmp_path, lambda _: HARMLESS[name]()) == []


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations, until it is told."""
    monkeypatch.setattr(learner, "_WITHIN", 8)


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("name", IN_THE_WAY)
def test_one_that_sets_dispatch_back_is_named(tmp_path: Path, name: str) -> None:
    [line] = train(tmp_path, lambda _: IN_THE_WAY[name]())
    assert f"no schedule was learned (step() is called within {name}, where no recording can begin or end; " in line


@pytest.mark.parametrize("name", IN_THE_WAY)
@pytest.mark.parametrize("every", [4, 7])
def test_one_that_is_there_now_and_then_is_waited_for(tmp_path: Path, name: str, every: int) -> None:
    """As a validation that ends some iterations: a recording may begin before it, and is not ended within it."""
    assert train(tmp_path, lambda number: nullcontext() if number % every else IN_THE_WAY[name]()) == []


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("name", IN_THE_WAY)
@pytest.mark.parametrize("every", [2, 3])
def test_one_that_is_there_whenever_a_recording_would_begin_or_end_is_named(
    tmp_path: Path, name: str, every: int
) -> None:
    """Of three steps in turn the third ends what the second began."""
    [line] = train(tmp_path, lambda number: nullcontext() if number % every else IN_THE_WAY[name]())
    assert f"step() is called within {name}" in line
