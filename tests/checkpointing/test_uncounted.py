"""State that is written as no operator shows and no version counts: through NumPy's memory, or by an extension."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_link import copies_take
from torch import nn

import checkflow
from checkflow.errors import TraceError
from checkflow.runtime import unmoved
from checkflow.state import memory
from checkflow.trace.tracing import trace_training

BYTES = 4096
SILENT: dict[str, Any] = {"tell": lambda _: None, "notify": lambda _: None}


def by_numpy(count: torch.Tensor) -> None:
    count.numpy()[:] += 1


def by_extension(count: torch.Tensor) -> None:
    ctypes.memset(count.data_ptr(), int(count[0]) + 1, BYTES)


class Counting(nn.Module):
    """Its buffer counts its iterations, which torch sees nothing of; its second layer is frozen."""

    count: torch.Tensor

    def __init__(self, write: Callable[[torch.Tensor], None], first: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("count", torch.zeros(BYTES, dtype=torch.uint8))
        self._write, self._left = write, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left < 0:
            self._write(self.count)
        found: torch.Tensor = self.frozen(self.layer(x))
        return found


def training_of(write: Callable[[torch.Tensor], None], first: int = 0) -> checkflow.Training:
    """`first`: iterations that do not write."""
    model = Counting(write, first)
    optimizer = torch.optim.AdamW(model.parameters())

    def iterate() -> None:
        torch.autograd.backward(model(torch.randn(4, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iterate)


def trained(training: checkflow.Training, store: Path, iterations: int, told: list[str], **given: Any) -> int:
    """The count after a restore, of another training of the kind, once so many iterations were made."""
    often: dict[str, Any] = {"interval": 1, "when_full": "wait", "tell": told.append, "notify": told.append}
    with checkflow.attach(training.model, training.optimizer, store=store, **often, **given) as ckpt:
        for _ in range(iterations):
            training.iteration()
            ckpt.step()
        assert ckpt.stats().discarded == 0
    other = training_of(lambda _: None)
    with checkflow.attach(other.model, other.optimizer, store=store, **often, **given) as ckpt:
        assert ckpt.restore() == iterations
    assert isinstance(other.model, Counting)
    return int(other.model.count[-1])


def test_the_same_bytes_at_other_places_are_others() -> None:
    """A hash on the host, sums elsewhere: of words, and of bytes where there are no whole words."""
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 4096, 8171, 5_000_003):
        tensor = torch.from_numpy(rng.integers(0, 255, size, dtype=np.uint8))
        array, ways = tensor.numpy(), (memory.fingerprint, lambda each: memory._of_sums(each.untyped_storage()))
        for of in ways:
            before, kept = of(tensor), array.copy()
            assert torch.equal(of(tensor), before)
            for change in (np.roll(array, 1), np.roll(array, 4), rng.permutation(array), array[::-1].copy()):
                array[:] = change
                assert torch.equal(of(tensor), before) == np.array_equal(change, kept), (size, of)
                array[:] = kept
            if size > 1:
                array[0], array[1] = 200, 3
                before = of(tensor)
                array[0], array[1] = 199, 4
                assert not torch.equal(of(tensor), before)
                array[:] = kept


@pytest.mark.parametrize("write", [by_numpy, by_extension])
def test_no_schedule_takes_it_for_unchanging(write: Callable[[torch.Tensor], None], tmp_path: Path) -> None:
    """Each of three slots is used more than once; what is frozen is copied once into each."""
    told = list[str]()
    assert trained(training_of(write), tmp_path / "store", 30, told) == 30
    assert any("model/count is written, and no operator shows where" in line for line in told), told
    with pytest.raises(TraceError, match=r"^net\.py: model/count is written, and no operator shows where: "):
        trace_training(lambda: training_of(write), model="net.py", real=True)


@pytest.mark.parametrize("write", [by_numpy, by_extension])
def test_a_schedule_that_does_is_not_believed(write: Callable[[torch.Tensor], None], tmp_path: Path) -> None:
    told = list[str]()
    schedule = checkflow.compile(lambda: training_of(lambda _: None))
    assert [row.written for row in schedule.state if row.views[0].name == "model/count"] == [False]
    assert trained(training_of(write), tmp_path / "store", 30, told, schedule=schedule) == 30
    assert sum("model/count: is written uncounted" in line for line in told) == 1, told
    assert not any("frozen" in line for line in told), told


@pytest.mark.parametrize("looks", [True, False])
def test_what_begins_later_is_seen_at_once_where_it_can_be_foreseen(
    looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's memory is looked at often; of other memory looks are seldom where they are slow."""
    if looks:
        monkeypatch.setattr(unmoved, "FIRST_LOOKS", 10**6)
    else:
        monkeypatch.setattr(unmoved, "SELDOM", 10**9)
        monkeypatch.setattr(unmoved, "OFTEN", 0)
    schedule = checkflow.compile(lambda: training_of(lambda _: None))
    for write in (by_numpy, by_extension):
        training, told = training_of(write, first=15), list[str]()
        assert isinstance(training.model, Counting)
        if write is by_numpy:
            training.model.count.numpy()  # who has this may write
        count = trained(training, tmp_path / write.__name__, 30, told, schedule=schedule)
        assert count == (15 if looks or write is by_numpy else 0), told


@pytest.mark.parametrize("write", [by_numpy, by_extension])
def test_a_checkpoint_on_its_way_is_none_the_worse_for_it(
    write: Callable[[torch.Tensor], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a frozen parameter, which no guard of a forward pass covers, and an update each fourth iteration."""

    def make(write: Callable[[torch.Tensor], None], every: int) -> checkflow.Training:
        torch.manual_seed(0)
        model, teacher = nn.Linear(256, 256), nn.Module()
        count = nn.Parameter(torch.zeros(BYTES, dtype=torch.uint8), requires_grad=False)
        teacher.register_parameter("count", count)
        model.add_module("teacher", teacher)
        optimizer, made = torch.optim.AdamW(model.parameters()), iter(range(1, 10**6))

        def iterate() -> None:
            torch.autograd.backward(model(torch.randn(4, 256)).square().mean())
            write(count.data)
            if next(made) % every == 0:
                optimizer.step()
                optimizer.zero_grad()

        return checkflow.Training(model, optimizer, iterate)

    copies_take(monkeypatch, lambda _: 0.01)
    schedule = checkflow.compile(lambda: make(lambda _: None, 1))
    training, told = make(write, 4), list[str]()
    with checkflow.attach(
        training.model, training.optimizer, store=tmp_path / "store", schedule=schedule, interval=1, when_full="wait",
        tell=told.append, notify=told.append,
    ) as ckpt:  # fmt: skip
        for _ in range(30):
            training.iteration()
            ckpt.step()
        assert ckpt.stats().discarded == 0
    assert any("written uncounted" in line for line in told), told
    again = make(lambda _: None, 4)
    with checkflow.attach(again.model, again.optimizer, store=tmp_path / "store", **SILENT) as ckpt:
        assert ckpt.restore() == 30
    assert set(again.models[0].get_parameter("teacher.count").tolist()) == {30}


def test_what_is_listed_may_be_written_in_any_way(tmp_path: Path) -> None:
    """It is read when the iteration ends, so a schedule is learned all the same."""
    training, iterations, listed = training_of(lambda _: None), 0, {"count": torch.zeros(300)}
    with checkflow.attach(
        training.model, training.optimizer, store=tmp_path / "store", extra={"listed": listed}, **SILENT
    ) as ckpt:
        while ckpt.learning != "knowing":
            training.iteration()
            listed["count"].numpy()[:] += 1
            ckpt.step()
            iterations += 1
        assert ckpt.stats().learned_in
    again, found = training_of(lambda _: None), {"count": torch.zeros(300)}
    with checkflow.attach(
        again.model, again.optimizer, store=tmp_path / "store", extra={"listed": found}, **SILENT
    ) as ckpt:
        assert ckpt.restore() == iterations
    assert set(found["count"].tolist()) == {iterations}
