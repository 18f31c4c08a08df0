"""The same equality through everything: schedule, hooks, slots, saver, disk, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume_equality import LENGTH, advance, final, seed
from test_stateful_dataloader import LENGTH as LOADED_LENGTH
from test_stateful_dataloader import Life
from trainings_to_resume import TRAININGS, Make, Run

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.schedule import Schedule
from checkflow.state.host.objects import HostObjects
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13


def compiled(factory: Callable[[], Training]) -> Schedule:
    seed(0)
    graph = trace_training(factory, model="resumed", real=True, measure=True).graph
    answer = compile_graph(graph, Options(bandwidth_bytes_per_s=10**9))
    assert isinstance(answer, Compiled)
    return answer.schedule


def attached(training: Training, objects: HostObjects, schedule: Schedule, store: Path) -> Checkpointer:
    members = dict(objects.objects)
    return checkflow.attach(
        training.model,
        training.optimizer,
        schedule=schedule,
        store=store,
        scheduler=[member for name, member in members.items() if name.startswith("scheduler")],
        scaler=members.get("scaler"),
        loader=members.get("loader"),
        generators={
            name.removeprefix("generator."): g
            for name, g in objects.generators.items()
            if name.startswith("generator.")
        },
        metadata=objects.metadata,
        when_full="wait",
        persist_every=PersistEvery(iterations=1),
    )


def traceable(make: Make) -> Callable[[], Training]:
    """The training as its factory would give it."""

    def factory() -> Training:
        run = make()
        return replace(run.training, iteration=lambda: next(run.steps))

    return factory


def go(run: Run, ckpt: Checkpointer, until: int) -> None:
    for _ in range(ckpt.restore(), until):
        advance(run, 1)
        ckpt.step()


NAMES = [
    "plain sgd", "sgd", "adamw looped", "adamw foreach", "adamw fused", "tied", "channels_last", "accumulation",
    "scaler", "scaler, fused", "several", "scheduler onecycle", "scheduler plateau", "scheduler sequential",
    "tensor lr", "bfloat16",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_from_disk_ends_as_one_without_checkflow(name: str, tmp_path: Path) -> None:
    """Without checkflow in one go; with it in two lives, the second from other seeds."""
    make = TRAININGS[name]
    schedule = compiled(traceable(TRAININGS[name.replace("scaler", "calm scaler")]))
    seed(1)
    whole = make()
    advance(whole, LENGTH)
    expected = final(whole)
    seed(1)
    first = make()
    with attached(first.training, first.objects, schedule, tmp_path / "store") as ckpt:
        go(first, ckpt, 3)
    seed(2)
    second = make()
    with attached(second.training, second.objects, schedule, tmp_path / "store") as ckpt:
        assert ckpt.restore() == 3
        go(second, ckpt, LENGTH)
    assert final(second) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shared", "plain"])
@pytest.mark.parametrize("at", [3, 4])
def test_the_data_go_on_too(kind: str, workers: int, at: int, tmp_path: Path) -> None:
    """StatefulDataLoader and the plain loader, in an epoch's middle and at its end."""

    def factory() -> Training:
        life = Life("ordered", 0)
        return replace(life.training, iteration=lambda: next(life.steps))

    schedule = compiled(factory)
    whole = Life(kind, workers)
    whole.advance(LOADED_LENGTH)
    items, expected = whole.items, whole.end()
    seen: list[list[int]] = []
    for until in (at, LOADED_LENGTH):
        life = Life(kind, workers)
        with attached(life.training, life.objects, schedule, tmp_path / "store") as ckpt:
            for _ in range(ckpt.restore(), until):
                life.advance(1)
                ckpt.step()
        seen += life.items
        found = life.end()
    assert seen == items
    assert found == expected
