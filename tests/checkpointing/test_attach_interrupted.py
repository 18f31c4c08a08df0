"""Ctrl-C while a training is being attached, in a notebook: the next cell attaches it again."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from interrupting import assert_nothing_is_left, interrupted_at, others, plain_saver
from test_attach import attached, compiled, small

pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
RETURN = 6  # lines at the end, the Checkpointer is made: to return it, and to let the collector work again

__all__ = ["others"]  # a fixture of every test here


def test_an_interrupt_at_any_line_of_attach_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No saver, lock, memory or hook, though the model lives on."""
    schedule, store, training = compiled(small), tmp_path / "store", small()
    monkeypatch.setattr(sys, "executable", str(plain_saver(tmp_path)))
    for _ in range(2):  # the first runs more, once
        with interrupted_at(0) as lines:
            checkpointer = attached(training, schedule, store)
        checkpointer.close()
    hooks = [len(module._forward_pre_hooks) for module in training.models[0].modules()]
    every = range(1, lines[0] + 1 - RETURN)
    for line in every if NIGHTLY else sorted([*random.Random(0).sample(every, 20), *every[-20:]]):
        with pytest.raises(KeyboardInterrupt), interrupted_at(line):
            attached(training, schedule, store)
        assert_nothing_is_left(store)
        assert hooks == [len(module._forward_pre_hooks) for module in training.models[0].modules()]
