"""The plain loader: each item once an epoch, the position of what was consumed, and no global random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from checkflow.data import ResumableLoader
from checkflow.errors import InputError


class Numbers(Dataset[int]):
    """0..size-1."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Each item with numbers from the three global generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:  # type: ignore[override]
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


def forever(loader: ResumableLoader[int]) -> Iterator[object]:
    while True:
        for batch in loader:
            yield tuple(torch.as_tensor(part).tolist() for part in batch) if isinstance(batch, list) else _list(batch)


def _list(batch: object) -> object:
    return torch.as_tensor(batch).tolist()


@given(
    size=st.integers(1, 20), batch_size=st.integers(1, 7), other_size=st.integers(1, 7), drop=st.booleans(),
    shuffle=st.booleans(), consumed=st.integers(0, 40), seed=st.integers(0, 3),
)  # fmt: skip
def test_every_epoch_shows_each_item_once_across_a_resume(
    size: int, batch_size: int, other_size: int, drop: bool, shuffle: bool, consumed: int, seed: int
) -> None:
    """Interrupted anywhere, resumed in new objects with any batch size: no item twice, none left out."""
    assume(not drop or size >= max(batch_size, other_size))
    loader = ResumableLoader(Numbers(size), batch_size, shuffle=shuffle, seed=seed, drop_last=drop)
    taken = forever(loader)
    epochs: dict[int, list[int]] = {}
    for _ in range(consumed):
        batch = next(taken)
        assert isinstance(batch, list)
        epochs.setdefault(loader.epoch, []).extend(batch)
    state = loader.state_dict()
    other = ResumableLoader(Numbers(size), other_size, shuffle=shuffle, seed=seed, drop_last=drop)
    other.load_state_dict(state)
    assert other.epoch == loader.epoch
    rest = epochs.setdefault(other.epoch, [])
    for batch in other:
        rest += torch.as_tensor(batch).tolist()
    for epoch, items in epochs.items():
        assert len(set(items)) == len(items)
        assert drop or sorted(items) == list(range(size))
        if not shuffle:
            assert items == list(range(len(items)))
        assert epoch <= other.epoch


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 9])
def test_a_resumed_loader_gives_what_would_have_come(workers: int, persistent: bool, at: int) -> None:
    """With workers that fetch ahead too, in the middle of an epoch and at its end; random augmentations included."""

    def make() -> ResumableLoader[int]:
        return ResumableLoader(
            Augmented(14), 4, shuffle=True, seed=5, num_workers=workers, persistent_workers=persistent
        )

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    whole = forever(make())
    expected = list(islice(whole, 12))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loader = make()
    seen = list(islice(forever(loader), at))
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    seen += islice(forever(other), 12 - at)
    assert seen == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_generators_are_left_alone(workers: int) -> None:
    """Iterating, with shuffling and workers, draws nothing from the training's generators."""
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    list(ResumableLoader(Numbers(9), 2, shuffle=True, num_workers=workers))
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_a_pass_left_early_is_continued() -> None:
    """After break the next loop goes on; set_epoch with the same number changes nothing, with another begins it."""
    loader = ResumableLoader(Numbers(6), 2)
    for batch in loader:
        assert _list(batch) == [0, 1]
        break
    loader.set_epoch(0)
    assert [_list(batch) for batch in loader] == [[2, 3], [4, 5]]
    assert loader.epoch == 1
    next(iter(loader))
    loader.set_epoch(4)
    assert [_list(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert loader.epoch == 5


def test_an_epoch_that_ended_resumes_with_a_pass_of_no_batches() -> None:
    """What the user does at an epoch's end was not done when the last batch's checkpoint was taken."""
    loader = ResumableLoader(Numbers(4), 2)
    states = [loader.state_dict() for _ in loader]
    other = ResumableLoader(Numbers(4), 2)
    other.load_state_dict(states[-1])
    assert (other.epoch, list(other), other.epoch) == (0, [], 1)


def test_a_pass_left_at_its_last_batch_has_ended() -> None:
    """zip and islice leave it there, and so does a break: the next loop begins the next epoch, with all its batches."""
    one, other = (ResumableLoader(Numbers(5), 2, shuffle=True, seed=seed) for seed in range(2))
    assert [len(list(zip(one, other, strict=False))) for _ in range(3)] == [3, 3, 3]
    assert [len(list(islice(other, 3))) for _ in range(3)] == [3, 3, 3]
    for kind in ({"batch_size": 2, "drop_last": True}, {"batch_sampler": [[0, 1], [2, 3]]}):
        loader = ResumableLoader(Numbers(5), **kind)
        epochs = []
        for _ in range(3):
            for number, _ in enumerate(loader):
                if number == 1:
                    break
            epochs.append(loader.epoch)
        assert epochs == [0, 1, 2]


def test_loaders_in_step_are_in_step_after_a_resume_at_an_epochs_end() -> None:
    """The second of a zip is never asked for the batch that it has not: its next pass is whole all the same."""
    loaders = [ResumableLoader(Numbers(4), 2, shuffle=True, seed=seed) for seed in range(2)]
    for _ in zip(*loaders, strict=False):
        states = [loader.state_dict() for loader in loaders]
    again = [ResumableLoader(Numbers(4), 2, shuffle=True, seed=seed) for seed in range(2)]
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert list(zip(*again, strict=False)) == []
    for _ in range(2):
        expected = [[_list(batch) for batch in pair] for pair in zip(*loaders, strict=False)]
        assert [[_list(batch) for batch in pair] for pair in zip(*again, strict=False)] == expected
        assert len(expected) == 2


class Buckets(torch.utils.data.Sampler[list[int]]):
    """Batches of unequal size, in an order that depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9]]
        return iter(batches[self.epoch % 4 :] + batches[: self.epoch % 4])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", range(6))
def test_batch_samplers_are_resumed_at_their_batches(workers: int, at: int) -> None:
    """Of unequal sizes, with set_epoch."""
    expected = list(islice(forever(ResumableLoader(Numbers(10), batch_sampler=Buckets())), 9))
    loader = ResumableLoader(Numbers(10), batch_sampler=Buckets(), num_workers=workers)
    seen = list(islice(forever(loader), at))
    other = ResumableLoader(Numbers(10), batch_sampler=Buckets(), num_workers=workers)
    other.load_state_dict(loader.state_dict())
    assert seen + list(islice(forever(other), 9 - at)) == expected


def test_a_dataset_that_fetches_batches_is_asked_for_batches() -> None:
    """__getitems__ of the dataset is used; a collate function as well; len is in batches."""

    class Whole(Numbers):
        def __getitems__(self, indices: Sequence[int]) -> list[int]:
            return [10 * index for index in indices]

    loader = ResumableLoader(Whole(5), 2, collate_fn=sum)
    assert (len(loader), list(loader)) == (3, [10, 50, 40])
    assert len(ResumableLoader(Whole(5), 2, drop_last=True)) == 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def _state(**changes: object) -> dict[str, object]:
    return ResumableLoader(Numbers(6), 2).state_dict() | changes


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (_state(seed=1), "loader: seed is 0, 1 in the checkpoint"),
        (_state(size=7), "loader: size is 6, 7 in the checkpoint"),
        (_state(shuffle=True), "loader: shuffle is False, True in the checkpoint"),
        (_state(items=7), "item 7 is no position"),
        (_state(epoch=-1), "epoch -1, item 0 is no position"),
        (_state(items="2"), "the state's 'items' is '2'"),
        ({}, "the state's 'epoch' is None"),
    ],
)
def test_a_state_of_other_data_is_refused(state: dict[str, object], message: str) -> None:
    """Before the position changes."""
    loader = ResumableLoader(Numbers(6), 2)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(InputError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_a_position_inside_a_batch_is_refused() -> None:
    """Another batch sampler than the one that was saved."""
    loader = ResumableLoader(Numbers(10), batch_sampler=Buckets())
    with pytest.raises(InputError, match="no batch begins after 2 items of epoch 0"):
        loader.load_state_dict(loader.state_dict() | {"items": 2})


def test_what_cannot_be_resumed_is_refused() -> None:
    """Streams, samplers without a seed, sizes out of range, two passes at once."""
    with pytest.raises(InputError, match="iterable dataset"):
        ResumableLoader(Stream())
    data = TensorDataset(torch.arange(4))
    with pytest.raises(InputError, match="RandomSampler gives another order each time"):
        ResumableLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))
    ResumableLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False))

    class Mine(RandomSampler):
        """Of the user's."""

    class Counting(SequentialSampler):
        """Begins elsewhere each time."""

        begun = 0

        def __iter__(self) -> Iterator[int]:
            self.begun += 1
            return iter([(self.begun + index) % 4 for index in range(4)])

    for sampler in (Mine(data), Counting(data)):
        with pytest.raises(InputError, match=f"a {type(sampler).__name__} gives another order each time"):
            ResumableLoader(data, batch_sampler=BatchSampler(sampler, 1, False))
    with pytest.raises(InputError, match="batch_size 0"):
        ResumableLoader(data, 0)
    for argument, message in (
        ("sampler", "^loader: sampler is not taken; give a torch.utils.data.Subset"),
        ("generator", "^loader: generator is not taken; give a seed"),
        ("bach_size", "^loader: 'bach_size' is no argument of ResumableLoader"),
    ):
        with pytest.raises(InputError, match=message):
            ResumableLoader(data, **{argument: 1})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^loader: dataset: TypeError: .* of a 0-d tensor; give one that has items"):
        ResumableLoader(torch.tensor(3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^loader: timeout is how long a worker is waited for, and there is none"):
        ResumableLoader(data, timeout=1)
    loader = ResumableLoader(Numbers(6), 2)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(InputError, match="one pass at a time"):
        next(first)
