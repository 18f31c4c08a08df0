"""State that is shared, replaced, turned around, wrapped or named alike is saved and restored like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_attach
import torch
from odd_trainings import ODD, Lookahead

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.schedule import Schedule
from checkflow.state.live import live_state
from checkflow.state.memory import memory_order
from checkflow.store.format.reader import list_checkpoints
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

WHOLE = 11


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


def attached(training: Training, schedule: Schedule, store: Path, **options: Any) -> Checkpointer:
    return test_attach.attached(training, schedule, store, **{"notify": lambda _line: None} | options)


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


def test_what_lies_otherwise_than_planned_is_told_once(schedules: dict[str, Schedule], tmp_path: Path) -> None:
    """In one line, and named in the statistics."""
    told: list[str] = []
    training = ODD["turning"]()
    with attached(training, schedule_of("turning", schedules), tmp_path / "store", notify=told.append) as ckpt:
        train(training, ckpt, 8)
        assert "optimizer/0.weight.basis" in ckpt.stats().unwatched
    moved = [line for line in told if "lies in memory otherwise than at attach" in line]
    assert moved[0].startswith("optimizer/0.weight.basis and 7 more: ") and len(moved) == len(set(moved)) <= 2
    told.clear()
    training = ODD["replacing"]()
    with attached(training, schedule_of("replacing", schedules), tmp_path / "other", notify=told.append) as ckpt:
        train(training, ckpt, 6)
    assert told == [
        "model/0.weight and 7 more: replaced in each iteration, not updated in place; read when the iteration has ended"
    ]


def test_replaced_state_is_told_of_when_it_is_traced() -> None:
    """With its size; it may be read until its update, and is held beside the new until the iteration ends."""
    traced = trace_training(ODD["replacing"], model="replacing")
    (note,) = [note for note in traced.notes if "replaced in each iteration" in note]
    assert note.startswith("model/0.weight and 7 more (152 B): ")
    graph = traced.graph
    index = next(i for i, tensor in enumerate(graph.tensors) if tensor.name == "optimizer/0.weight.average")
    steps = graph.writes[index]
    assert steps[-1] == graph.steps and graph.ops[steps[0] - 1].name.startswith("aten.add")
    beside = [t for t in graph.tensors if t.born == steps[0] and t.freed == graph.steps and not t.role.is_state]
    assert [tensor.size_bytes for tensor in beside] == [graph.tensors[index].size_bytes]


def test_a_checkpoint_that_no_restore_would_take_is_refused_when_it_is_staged(
    schedules: dict[str, Schedule], tmp_path: Path
) -> None:
    """A scheduler whose keys differ each time it is asked."""

    class Moody(torch.optim.lr_scheduler.LambdaLR):
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict() | {f"mood {self.asked}": 1}

    training = ODD["adversaries"]()
    moody = Moody(training.optimizers[0], lambda _epoch: 1.0)
    with (
        pytest.raises(InputError, match=r"no restore would take this training's checkpoints: scheduler\.mood"),
        attached(training, schedule_of("adversaries", schedules), tmp_path / "store", scheduler=moody) as ckpt,
    ):
        train(training, ckpt, 3)
    assert not list_checkpoints(tmp_path / "store")


def test_what_attach_refuses_is_said_in_one_line(schedules: dict[str, Schedule], tmp_path: Path) -> None:
    """What is no model, no optimizer, or none that can be saved; and the names nearest to one that is not there."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 3))
    schedule = schedule_of("passing", schedules)
    renamed = torch.nn.ModuleDict({"0": net[0], "2_": net[2]})
    adam = torch.optim.AdamW(net.parameters())
    for model, optimizer, message in (
        (net, torch.optim.LBFGS(net.parameters()), "optimizer: LBFGS keeps lists of tensors that grow"),
        (net, 3, "optimizer: optimizer is int; give a torch.optim.Optimizer"),
        (net, ["adam"], "optimizer: optimizer is str"),
        (3, adam, "model: is int; give an nn.Module"),
        (renamed, adam, r"model/2\.weight: in the schedule, but not in this training \(nearest: model/2_\.weight, "),
    ):
        with pytest.raises(InputError, match=message) as caught:
            checkflow.attach(model, optimizer, schedule=schedule, store=tmp_path / "store")  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


class PlainHooks(Lookahead):
    """As copied wrappers are: without Optimizer.__init__, but with its zero_grad(), which makes step() run hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        torch.optim.Optimizer.zero_grad(self, set_to_none)


def test_a_wrapper_whose_step_comes_to_run_hooks_has_none_from_beginning_to_end(tmp_path: Path) -> None:
    """Its state grows in the first iteration, after which hooks are registered anew."""

    def made() -> Training:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        optimizer = PlainHooks(torch.optim.AdamW(net.parameters(), lr=0.05))

        def iteration() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(net(torch.randn(5, 4)).square().sum())
            optimizer.step()

        return Training(net, optimizer, iteration)

    whole = made()
    for _ in range(6):
        whole.iteration()
    for until in (3, 6):
        training = made()
        options: dict[str, Any] = {"notify": lambda _line: None, "tell": lambda _line: None}
        with checkflow.attach(training.models, training.optimizers, store=tmp_path, **options) as ckpt:
            train(training, ckpt, until)
    assert bits(training, "") == bits(whole, "")


def test_accelerates_wrappers_are_seen_through(tmp_path: Path) -> None:
    """Its optimizer has no hooks of its own."""
    accelerate = pytest.importorskip("accelerate")

    def factory() -> Training:
        made = ODD["passing"]()
        prepare = accelerate.Accelerator(cpu=True).prepare
        net, optimizer = prepare(made.models[0], torch.optim.AdamW(made.models[0].parameters(), lr=0.05))

        def iteration() -> None:
            torch.autograd.backward(net(torch.randn(5, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()

        return Training(net, optimizer, iteration)

    _resumes(factory, tmp_path)


def test_fabrics_wrappers_are_seen_through(tmp_path: Path) -> None:
    """Both its module and its optimizer."""
    fabric = pytest.importorskip("lightning.fabric")

    def factory() -> Training:
        made = ODD["passing"]()
        setup = fabric.Fabric(accelerator="cpu", devices=1).setup
        net, optimizer = setup(made.models[0], torch.optim.AdamW(made.models[0].parameters(), lr=0.05))

        def iteration() -> None:
            torch.autograd.backward(net(torch.randn(5, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()

        return Training(net, optimizer, iteration)

    _resumes(factory, tmp_path)


def _resumes(factory: Callable[[], Training], store: Path) -> None:
    """Traced on real tensors, since frameworks look at values; one half, then the other."""
    graph = trace_training(factory, model="wrapped", real=True).graph
    answer = compile_graph(graph.retimed("none", [10_000] * graph.steps), Options(bandwidth_bytes_per_s=10**8))
    assert isinstance(answer, Compiled)
    assert {row.views[0].name for row in answer.schedule.state} >= {"model/0.weight", "optimizer/0.weight.exp_avg"}
    whole, first, second = factory(), factory(), factory()
    torch.manual_seed(7)
    for _ in range(6):
        whole.iteration()
    torch.manual_seed(7)
    with attached(first, answer.schedule, store / "store") as ckpt:
        train(first, ckpt, 3)
        assert ckpt.stats().unwatched == ()
    with attached(second, answer.schedule, store / "store") as ckpt:
        train(second, ckpt, 6)
    assert bits(second, "") == bits(whole, "")
