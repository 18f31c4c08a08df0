"""torchdata's StatefulDataLoader: the position of the last batch the loop consumed, whatever workers fetched ahead."""

from __future__ import annotations

import gc
import random
from collections.abc import Generator

import numpy as np
import pytest
import torch
from resume_memory import load, save
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from checkflow.data import ResumableLoader
from checkflow.state.host.objects import HostObjects
from checkflow.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
LENGTH = 11  # iterations; an epoch has 4


class Points(Dataset[tuple[int, torch.Tensor]]):
    """Item i and a point that depends on it."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((3,), float(index)).sin()


class Life:
    """A model with dropout, trained from a loader; what it was given is in `items`."""

    def __init__(self, kind: str, workers: int) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 1))
        self.loader = make_loader(kind, workers)
        self.training = Training(model, torch.optim.AdamW(model.parameters()), lambda: None)
        self.objects = HostObjects.of(loader=self.loader)
        self.items: list[list[int]] = []
        self.steps = self._steps(model)

    def _steps(self, model: nn.Module) -> Generator[None, None, None]:
        optimizer = self.training.optimizers[0]
        while True:
            for index, x in self.loader:  # type: ignore[attr-defined]
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.items.append(index.tolist())
                yield

    def advance(self, iterations: int) -> None:
        for _ in range(iterations):
            next(self.steps)

    def end(self) -> tuple[object, ...]:
        """Its state; its workers end, because the next life's would inherit them and wait for them."""
        state = [p.detach().numpy().tobytes() for p in self.training.models[0].parameters()]
        found = state, torch.rand(3).tolist(), random.random(), np.random.random()
        self.steps.close()
        if isinstance(self.loader, StatefulDataLoader):
            self.loader.load_state_dict({})
        gc.collect()
        return found


def make_loader(kind: str, workers: int) -> object:
    """`shared`: one generator for order and workers; `global`: torch's own; `plain`: checkflow's."""
    if kind == "plain":
        return ResumableLoader(Points(), 4, shuffle=True, num_workers=workers)
    generator = torch.Generator().manual_seed(9) if kind == "shared" else None
    return StatefulDataLoader(Points(), 4, shuffle=kind != "ordered", num_workers=workers, generator=generator)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shared", "global", "ordered", "plain"])
@pytest.mark.parametrize("at", [0, 2, 4, 5])
def test_the_order_of_the_data_and_every_bit_go_on(kind: str, workers: int, at: int) -> None:
    """In the middle of an epoch, at its last batch, and over the epochs that follow."""
    whole = Life(kind, workers)
    save(whole.training, whole.objects, 0)  # attach reads everything once
    whole.advance(LENGTH)
    expected = whole.end()

    first = Life(kind, workers)
    save(first.training, first.objects, 0)
    first.advance(at)
    saved = save(first.training, first.objects, at)
    first.end()

    second = Life(kind, workers)
    torch.manual_seed(77)
    save(second.training, second.objects, 0)
    load(saved, second.training, second.objects)
    second.advance(LENGTH - at)
    assert first.items + second.items == whole.items
    assert second.end() == expected
