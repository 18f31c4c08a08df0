"""After a resume what is surprising is told; what cannot be is refused; what is as it was is silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attach import compiled, small, train
from test_narrator import attached

import checkflow
from checkflow.checkpointing.resumed import doubts
from checkflow.errors import CorruptStoreError
from checkflow.schedule import Schedule
from checkflow.state.host.modes import ModeReader, mode_in, modes_of
from checkflow.state.host.objects import HostObjects
from checkflow.state.restore import restore
from checkflow.store.format.reader import load_newest
from checkflow.training import Training


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return compiled(small)


def test_what_decides_the_last_bits_is_told_where_it_is_otherwise(tmp_path: Path) -> None:
    def told(threads: int) -> list[str]:
        lines = list[str]()
        now = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters())
            with checkflow.attach(model, optimizer, store=tmp_path, notify=lines.append, tell=lambda _: None) as ckpt:
                ckpt.restore()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
        finally:
            torch.set_num_threads(now)
        return lines

    assert told(2) == told(2) == []
    (line,) = told(1)
    assert f"{tmp_path}: threads 2 -> 1 since iteration 2 was saved: the last bits of results may be others" in line


def loader() -> checkflow.ResumableLoader[Any]:
    return checkflow.ResumableLoader(torch.utils.data.TensorDataset(torch.zeros(40)))


@pytest.mark.parametrize(
    ("frozen", "resumes", "is_told"),
    [
        (lambda i, began: i < 4 if began == 0 else True, 6, True),  # what unfreezes it at 4 comes no more
        (lambda i, _: i < 4, 6, False),
        (lambda i, _: i < 4, 4, False),
        (lambda i, _: i % 2 == 0, 5, False),
        (lambda i, _: i % 2 == 0, 6, False),
        (lambda i, began: i == 5 and began == 0, 6, True),
    ],
    ids=["once", "in each iteration", "in the first one", "in turns", "in other turns", "trained since"],
)
def test_what_was_frozen_and_is_not_is_told_once(
    frozen: Callable[[int, int], bool], resumes: int, is_told: bool, tmp_path: Path
) -> None:
    told: list[str] = []

    def life(until: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        model[0].requires_grad_(not frozen(0, 0))
        optimizer = torch.optim.AdamW(model.parameters())
        with checkflow.attach(model, optimizer, store=tmp_path, notify=told.append, tell=lambda _: None) as ckpt:
            began = ckpt.restore()
            for iteration in range(began, until):
                model[0].requires_grad_(not frozen(iteration, began))
                torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()

    life(resumes)
    life(resumes + 4)
    lines = [line for line in told if " when what was restored was saved, and " in line]
    assert len(lines) == is_told and all("model/0.bias and 1 more: " in line for line in lines)


BEFORE = -1  # attach


def is_frozen_at_4_of_the_first_life(model: torch.nn.Sequential, iteration: int, began: int) -> None:
    if iteration == 4 and not began:
        model[1].eval()


def is_trained_at_4_of_the_first_life(model: torch.nn.Sequential, iteration: int, began: int) -> None:
    if iteration in (BEFORE, 4):
        model[1].train(iteration == 4 and not began)


def is_frozen_in_each_iteration(model: torch.nn.Sequential, _iteration: int, _began: int) -> None:
    model.train()
    model[1].eval()


def is_frozen_from_6_on(model: torch.nn.Sequential, iteration: int, _began: int) -> None:
    model[1].train(iteration < 6)


def is_left_in_evaluation(model: torch.nn.Sequential, iteration: int, _began: int) -> None:
    model[1].train(iteration > 2)
    model.train(iteration % 2 == 0)
    if iteration % 2 == 0 and iteration <= 2:
        model[1].eval()


def is_in_turns(model: torch.nn.Sequential, iteration: int, _began: int) -> None:
    model[1].train(iteration % 2 == 0)


def begins_in_evaluation(model: torch.nn.Sequential, iteration: int, began: int) -> None:
    model.train(iteration > began)


BN_WAS_EVALUATED = "model/1: in evaluation mode when what was restored was saved, and in training mode since; "
BN_WAS_TRAINED = "model/1: in training mode when what was restored was saved, and in evaluation mode since; "


@pytest.mark.parametrize(
    ("switch", "said"),
    [
        (is_frozen_at_4_of_the_first_life, BN_WAS_EVALUATED),
        (is_trained_at_4_of_the_first_life, BN_WAS_TRAINED),
        (is_frozen_in_each_iteration, ""),
        (is_frozen_from_6_on, ""),
        (is_left_in_evaluation, ""),
        (is_in_turns, ""),
        (begins_in_evaluation, ""),
    ],
)
def test_a_module_whose_mode_is_otherwise_than_before_the_resume_is_told_once(
    switch: Callable[[torch.nn.Sequential, int, int], None], said: str, tmp_path: Path
) -> None:
    told: list[str] = []

    def life(until: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        switch(model, BEFORE, 0)
        optimizer = torch.optim.AdamW(model.parameters())
        with checkflow.attach(model, optimizer, store=tmp_path, notify=told.append, tell=lambda _: None) as ckpt:
            began = ckpt.restore()
            for iteration in range(began, until):
                switch(model, iteration, began)
                torch.autograd.backward(model(torch.randn(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()

    life(6)
    life(11)
    lines = [line for line in told if " when what was restored was saved, and " in line]
    assert len(lines) == bool(said) and all(said in line for line in lines), lines


def test_a_record_notes_modes_only_where_they_differ_and_gives_all_of_them_back() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    model = torch.nn.Sequential(inner, torch.nn.Dropout())
    training = Training(model, torch.optim.SGD(model.parameters()), lambda: None)
    reader = ModeReader(training)
    assert reader.read() == {"model": True}
    inner.eval()
    inner[1].train()
    expected = {"model": True, "model/0": False, "model/0.1": True}
    assert reader.read() == expected
    modes = modes_of(training)
    assert {subject: mode_in(expected, subject) for subject in modes} == modes
    model[0] = torch.nn.Dropout().eval()  # without a tensor, of which nothing else tells
    assert reader.read() == {"model": True, "model/0": False}
    model.eval()
    assert reader.read() == {} and mode_in({}, "model/0") is None


def test_what_is_as_it_was_is_silent_and_what_is_not_is_told(schedule: Schedule, tmp_path: Path) -> None:
    """A loader that was never asked, and a rate that somebody changed behind the scheduler."""
    for asked, factor in ((True, 1.0), (False, 3.0)):
        training, store = small(), tmp_path / str(asked)
        scheduler, data = torch.optim.lr_scheduler.StepLR(training.optimizers[0], 1), loader()
        with attached(training, schedule, store, scheduler=scheduler, loader=data) as ckpt:
            batches = iter(data)
            for _ in range(2):
                if asked:
                    next(batches)
                training.iteration()
                scheduler.step()
                training.optimizers[0].param_groups[0]["lr"] *= factor
                ckpt.step()
        told: list[checkflow.Event] = []
        training = small()
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizers[0], 1)
        options: dict[str, Any] = {"scheduler": scheduler, "loader": loader(), "on_event": told.append}
        with attached(training, schedule, store, **options) as ckpt:
            assert ckpt.restore() == 2
        lines = [str(event) for event in told if isinstance(event, checkflow.Doubted)]
        if asked:
            assert not lines
        else:
            assert lines[0].startswith("scheduler: left the learning rates ")
            assert lines[1].startswith("loader: stands at item 0 of epoch 0 after 2 iterations")


def test_a_parameter_that_took_steps_has_what_others_have() -> None:
    training = small()
    training.iteration()
    optimizer = training.optimizers[0]
    assert not doubts(1, training, HostObjects())
    del optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert not doubts(1, training, HostObjects())  # it may never have had a gradient
    del optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"]
    (line,) = doubts(1, training, HostObjects())
    assert line.startswith("optimizer 0, group 0: 1 parameters have taken steps but have no exp_avg, as others of")


def test_an_optimizer_may_keep_of_each_shape_something_else() -> None:
    """Adafactor keeps rows and columns of matrices, and all of vectors."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    torch.autograd.backward(model(torch.ones(4, 3)).sum())
    optimizer.step()  # type: ignore[no-untyped-call]
    assert not doubts(1, Training(model, optimizer, lambda: None), HostObjects())


def test_of_several_loaders_one_gives_what_is_trained_with() -> None:
    """The other one may be what is evaluated with."""
    asked, other = loader(), loader()
    next(iter(asked))
    training = small()
    assert not doubts(1, training, HostObjects.of(loader=[asked, other]))
    assert len(doubts(3, training, HostObjects.of(loader=[asked, other]))) == 2


def test_what_is_restored_in_inference_mode_can_be_trained(schedule: Schedule, tmp_path: Path) -> None:
    """The optimizer's state is made by restoring; torch lets nobody update what was made in that mode."""
    for resumed in (0, 2):
        training = small()
        with attached(training, schedule, tmp_path / "store") as ckpt:
            with torch.inference_mode():
                assert ckpt.restore() == resumed
            (optimizer,) = training.optimizers
            made = [each for state in optimizer.state.values() for each in state.values()]
            assert bool(made) == bool(resumed) and not any(each.is_inference() for each in made)
            for _ in range(2):
                training.iteration()
                ckpt.step()


def test_a_record_of_another_iteration_is_refused(schedule: Schedule, tmp_path: Path) -> None:
    """Before anything is changed."""
    with attached(small(), schedule, tmp_path / "store") as ckpt:
        train(ckpt._training, ckpt, 2)
    loaded = load_newest(tmp_path / "store").loaded
    assert loaded is not None
    document = json.loads(loaded.record)
    document["iteration"] = 7
    other: Training = small()
    before = {name: tensor.clone() for name, tensor in other.models[0].state_dict().items()}
    with pytest.raises(CorruptStoreError, match=r"^commit.json: is of iteration 7, its checkpoint of 2"):
        restore(loaded.files, json.dumps(document).encode(), other, HostObjects(), iteration=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.models[0].state_dict().items())
