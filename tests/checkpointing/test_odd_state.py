"""State that is shared, replaced, turned around, wrapped or named alike is saved and restored like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from odd_trainings import ODD

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.runtime.state import live_state, memory_order
from checkflow.schedule import Schedule
from checkflow.store.pace import PersistEvery
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

WHOLE = 11


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small only lose by a thread pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def schedules() -> dict[str, Schedule]:
    return {}


def schedule_of(name: str, schedules: dict[str, Schedule]) -> Schedule:
    """Compiled once; each operator takes 10 us."""
    if name not in schedules:
        graph = trace_training(ODD[name], model=name).graph
        answer = compile_graph(graph.retimed("none", [10_000] * graph.steps), Options(bandwidth_bytes_per_s=10**8))
        assert isinstance(answer, Compiled)
        schedules[name] = answer.schedule
    return schedules[name]


def attached(training: Training, schedule: Schedule, store: Path) -> Checkpointer:
    return checkflow.attach(
        training.model,
        training.optimizer,
        schedule=schedule,
        store=store,
        policy="block",
        persist_every=PersistEvery(iterations=1),
        notify=lambda _line: None,
    )


def bits(training: Training, name: str) -> dict[str, object]:
    """Every state tensor's elements, and how an optimizer's lie; a model is restored as it lies."""
    return {
        live.name: (
            live.tensor.detach().reshape(-1).tolist(),
            live.optimizer is not None and name != "reformed" and memory_order(live.tensor),
        )
        for live in live_state(training)
    }


def ties(training: Training) -> set[frozenset[str]]:
    """Names that are one tensor."""
    by_place: dict[tuple[object, ...], set[str]] = {}
    for live in live_state(training):
        by_place.setdefault((live.tensor.data_ptr(), live.tensor.shape), set()).add(live.name)
    return {frozenset(names) for names in by_place.values()}


def train(training: Training, ckpt: Checkpointer, iterations: int) -> None:
    for _ in range(ckpt.restore(), iterations):
        training.iteration()
        ckpt.step()


@pytest.mark.parametrize("name", ODD)
def test_a_resumed_run_ends_as_one_that_was_never_interrupted(
    name: str, schedules: dict[str, Schedule], tmp_path: Path
) -> None:
    """Bit for bit, with the ties and memory orders that state had; interrupted early, in the middle and late."""
    schedule = schedule_of(name, schedules)
    whole = ODD[name]()
    for _ in range(WHOLE):
        whole.iteration()
    for interrupted in (1, 5, 9):
        store = tmp_path / str(interrupted)
        first = ODD[name]()
        with attached(first, schedule, store) as ckpt:
            train(first, ckpt, interrupted)
            assert ckpt.stats().discarded == 0
        second = ODD[name]()
        torch.manual_seed(99)
        with attached(second, schedule, store) as ckpt:
            assert ckpt.restore() == interrupted
            assert bits(second, name) == bits(first, name) and ties(second) == ties(first)
            if name != "reformed":  # which counts its iterations itself
                train(second, ckpt, WHOLE)
        assert name == "reformed" or (bits(second, name) == bits(whole, name) and ties(second) == ties(whole))
