"""Each kind of training attached without a schedule: right from the first iteration, whatever is learned meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_trainings import ALL
from torn import Case

import checkflow
from checkflow.store.trainer.persist_every import PersistEvery


@pytest.mark.parametrize("make", ALL, ids=lambda case: case.__name__)
def test_any_kind_of_training_is_checkpointed_while_it_is_learned(make: Callable[[], Case], tmp_path: Path) -> None:
    """Every staged state is the one that iteration ended with; what it computes is what it would have."""
    case, plain = make(), make()
    training = case.training
    torch.manual_seed(11)
    expected = []
    for number in range(14):
        plain.iterate(number)
        expected.append([p.detach().clone() for model in plain.training.models for p in model.state_dict().values()])
    torch.manual_seed(11)
    with checkflow.attach(
        training.model, training.optimizer, store=tmp_path / "store", extra=training.extra, when_full="wait",
        persist_every=PersistEvery(iterations=1), notify=lambda _: None, tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        for number in range(14):
            case.iterate(number)
            ckpt.step()
            now = [p.detach() for model in training.models for p in model.state_dict().values()]
            assert all(map(torch.equal, now, expected[number])), f"iteration {number + 1} computes something else"
            if number % 4 == 2:
                ckpt.save()
                ckpt.restore()
                now = [p.detach() for model in training.models for p in model.state_dict().values()]
                assert all(map(torch.equal, now, expected[number])), f"iteration {number + 1} was saved otherwise"
        assert ckpt.stats().discarded == 0
