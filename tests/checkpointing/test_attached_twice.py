"""A notebook's cell builds a model and attaches; run again it is refused, and the loop trains what it has built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkflow
from checkflow.runtime.without_update import FEW, STILL

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]
ANOTHER = "it checkpoints another model than this one, and what is trained now is in no checkpoint"
REFUSED = "attach() has refused another model"


def built() -> Trained:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters())


def attached(trained: Trained, store: Path, said: list[str]) -> checkflow.Checkpointer:
    return checkflow.attach(*trained, store=store, notify=said.append, tell=lambda _: None)


def train(trained: Trained, ckpt: checkflow.Checkpointer, iterations: int, zeroed: str = "after") -> None:
    model, optimizer = trained
    for _ in range(iterations):
        if zeroed == "before":
            optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
        optimizer.step()
        if zeroed == "after":
            optimizer.zero_grad()
        ckpt.step()


@pytest.mark.parametrize("zeroed", ["before", "after"])
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("begun", [0, 3])  # a store that has checkpoints is refused elsewhere
def test_what_is_trained_in_vain_is_told(tmp_path: Path, begun: int, restores: bool, zeroed: str) -> None:
    """Once in the loop, and by each save(); also where the loop's cell begins with a restore()."""
    said: list[str] = []
    first, again = built(), built()
    if begun:
        with attached(first, tmp_path, said) as ckpt:
            train(first, ckpt, begun)
    with attached(first, tmp_path, said) as ckpt:
        ckpt.restore()
        train(first, ckpt, 4, zeroed)
        with pytest.raises(checkflow.StoreBusyError, match=ANOTHER):
            attached(again, tmp_path, said)
        ckpt.save()
        assert not [line for line in said if REFUSED in line], said
        if restores:
            ckpt.restore()
        train(again, ckpt, FEW - 1, zeroed)
        assert not [line for line in said if REFUSED in line], said
        ckpt.save()
        train(again, ckpt, 9, zeroed)
        ckpt.save()
    lines = [line for line in said if REFUSED in line]
    assert [line.split(" ")[0] for line in lines] == ["save:", str(FEW), "save:"], said
    assert all("close() this Checkpointer, and attach the model that is trained" in line for line in lines)


@pytest.mark.parametrize("kind", ["the same", "frozen", "of another store"])
def test_what_cannot_be_trained_in_vain_is_not_told_of(tmp_path: Path, kind: str) -> None:
    """The model that is attached, with another optimizer, or beside one that is not trained; it may rest."""
    said: list[str] = []
    first, other = built(), built()
    models = [first[0], built()[0].requires_grad_(requires_grad=False)] if kind == "frozen" else [first[0]]
    again = torch.optim.AdamW(first[0].parameters())
    with attached(first, tmp_path / "one", said) as ckpt, attached(other, tmp_path / "two", said) as beside:
        with pytest.raises(checkflow.StoreBusyError) as refused:
            if kind == "of another store":
                attached(first, tmp_path / "two", said)
            else:
                checkflow.attach(models, again, store=tmp_path / "one")
        assert (ANOTHER in str(refused.value)) == (kind == "of another store")
        train(other, beside, 1)
        for _ in range(FEW + 1):
            ckpt.step()
    assert not [line for line in said if REFUSED in line], said


@pytest.mark.parametrize("kind", ["an update", "a gradient", "a write"])
def test_a_training_that_goes_on_after_another_was_refused_may_rest(tmp_path: Path, kind: str) -> None:
    said: list[str] = []
    first = built()
    with attached(first, tmp_path, said) as ckpt:
        train(first, ckpt, 4)
        with pytest.raises(checkflow.StoreBusyError, match=ANOTHER):
            attached(built(), tmp_path, said)
        for _ in range(FEW - 1):
            ckpt.step()
        if kind == "an update":
            train(first, ckpt, 1)
        elif kind == "a gradient":
            torch.autograd.backward(first[0](torch.randn(2, 4)).square().mean())
        else:
            with torch.no_grad():
                next(first[0].parameters()).add_(1.0)
        for _ in range(STILL + 2):
            ckpt.step()
        ckpt.save()
    assert not [line for line in said if REFUSED in line], said
