"""torchdata's StatefulDataLoader: the position of the last batch the loop consumed, whatever workers fetched ahead."""

from __future__ import annotations

import gc
import random
from collections.abc import Generator, Iterator

import numpy as np
import pytest
import torch
from resume_memory import load, save
from torch import nn
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from checkflow.data import ResumableLoader
from checkflow.errors import InputError
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
                self.items.append(torch.as_tensor(index).tolist())
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


class Own(Sampler[int]):
    """Draws its order by a generator that it keeps under a name of its own, or by everybody's."""

    def __init__(self, mine: torch.Generator | None = None) -> None:
        self.mine = mine

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(14, generator=self.mine).tolist())  # when it is asked for its iterator


class Shuffled(Own):
    """Draws from Python's, one index at a time."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(14))
        while left:
            yield left.pop(random.randrange(len(left)))


class Unseen(Own):
    """Draws from what nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn.permutation(14).tolist())


def of_the_users(kind: str) -> dict[str, object]:
    """What a StatefulDataLoader is given in place of shuffle."""
    generator = torch.Generator().manual_seed(9)
    weights = [1.0 + item for item in range(14)]
    given: dict[str, dict[str, object]] = {
        "weighted": {"batch_size": 4, "sampler": WeightedRandomSampler(weights, 14, generator=generator)},
        "own": {"batch_size": 4, "sampler": Own(generator)},
        "everybody's": {"batch_size": 4, "sampler": Own()},
        "batches": {"batch_sampler": BatchSampler(RandomSampler(Points()), 4, False)},
        "single": {"batch_size": None, "sampler": RandomSampler(range(4), generator=generator)},
        "Python's": {"batch_size": 4, "sampler": Shuffled()},
    }
    return given[kind]


def make_loader(kind: str, workers: int) -> object:
    """`shared`: one generator for order and workers; `global`: torch's own; `plain`: checkflow's."""
    if kind not in ("shared", "global", "ordered", "plain"):
        return StatefulDataLoader(Points(), num_workers=workers, **of_the_users(kind))
    if kind == "plain":
        return ResumableLoader(Points(), 4, shuffle=True, num_workers=workers)
    generator = torch.Generator().manual_seed(9) if kind == "shared" else None
    return StatefulDataLoader(Points(), 4, shuffle=kind != "ordered", num_workers=workers, generator=generator)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shared", "global", "ordered", "plain"])
@pytest.mark.parametrize("at", [0, 2, 4, 5])
def test_the_order_of_the_data_and_every_bit_go_on(kind: str, workers: int, at: int) -> None:
    """In the middle of an epoch, at its last batch, and over the epochs that follow."""
    goes_on(kind, workers, at)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("weighted", 0), ("own", 2), ("everybody's", 0), ("everybody's", 1), ("batches", 0), ("single", 0),
        ("Python's", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 2, 4])
def test_the_order_of_a_sampler_of_the_users_goes_on(kind: str, workers: int, at: int) -> None:
    """torchdata draws it anew, and skips what was given of another one."""
    goes_on(kind, workers, at)


def test_a_sampler_whose_order_cannot_be_drawn_again_is_refused() -> None:
    """By its name. One that knows its position, is told the epoch or draws nothing is left alone."""
    with pytest.raises(
        InputError, match=r"^loader: its sampler, a Unseen, gives another order each time, and not from"
    ):
        HostObjects.of(loader=StatefulDataLoader(Points(), 4, sampler=Unseen()))
    told: Sampler[int] = torch.utils.data.DistributedSampler(Points(), 1, 0)
    for sampler in (StatefulDistributedSampler(Points(), 1, 0), told, list(range(14))):
        loader = StatefulDataLoader(Points(), 4, sampler=sampler)
        HostObjects.of(loader=loader)
        assert loader.batch_sampler.sampler is sampler


def test_to_look_at_a_sampler_draws_nothing() -> None:
    """Nor does a second look wrap it once more."""
    own = Own(torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(Points(), 4, sampler=own)
    assert own.mine is not None
    before = own.mine.get_state().tolist(), torch.get_rng_state().tolist(), random.getstate()
    HostObjects.of(loader=loader)
    HostObjects.of(loader=loader)
    assert (own.mine.get_state().tolist(), torch.get_rng_state().tolist(), random.getstate()) == before
    assert loader.batch_sampler.sampler.sampler is own and len(loader) == 4


def goes_on(kind: str, workers: int, at: int) -> None:
    """A life that was interrupted there ends as one that was not."""
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
