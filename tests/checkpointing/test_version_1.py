"""Files that an earlier commit wrote are read, attached and restored as they lie.

`python tests/checkpointing/test_version_1.py FOLDER` writes them anew, with the checkflow that is installed. Those here
were written by 0.1.0 before compiled models were traced under their own names.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import checkflow
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.graphfile import read_graph, write_graph
from checkflow.hardware import load_profile, retime
from checkflow.schedule import read_schedule, write_schedule
from checkflow.trace.tracing import trace_training
from checkflow.training import Training
from checkflow.verify import verify

HERE = Path(__file__).parent / "version_1"
DONE = 3  # iterations, when the checkpoint was taken


def wrapped(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


class Run:
    """Two models in one optimizer, alike in their names, the first tied and compiled; and all kinds of other state."""

    def __init__(self, *, compiled: bool, fresh: int = 0) -> None:
        torch.manual_seed(fresh)
        first, last = nn.Linear(3, 3), nn.Linear(3, 3)
        last.weight = first.weight
        self.tied = first.weight
        self.models = [
            nn.Sequential(first, nn.BatchNorm1d(3), last),
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
        ]
        self.given: list[nn.Module] = list(self.models)
        if compiled:
            self.given[0] = wrapped(self.models[0])
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.1, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.generator = torch.Generator().manual_seed(fresh)
        self.ema = nn.Linear(3, 3)
        self.hidden = torch.zeros(2, 3)
        self.batch: dict[str, torch.Tensor] = {"x": torch.ones(4, 3)}
        self.losses: list[float] = []

    @property
    def extra(self) -> dict[str, object]:
        return {"ema": self.ema, "hidden": self.hidden, "batch": self.batch}

    def iterate(self) -> None:
        out = self.given[1](self.given[0](self.batch["x"])) + self.ema(self.batch["x"])
        self.optimizer.zero_grad()
        loss = out.square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        with torch.no_grad():
            self.ema.weight.lerp_(self.tied, 0.1)
            self.hidden.add_(1)

    def draw(self) -> None:
        """What no tensor of a graph tells of."""
        noise = torch.rand(4, 3, generator=self.generator) + torch.rand(4, 3)
        self.batch["x"] = noise + random.random() + float(np.random.random())
        self.scheduler.step()

    def training(self) -> Training:
        return Training(self.given, self.optimizer, self.iterate, self.extra)

    def train(self, schedule: Path, store: Path, until: int) -> int:
        """From the newest checkpoint on; which iteration that was of."""
        with checkflow.attach(
            self.given,
            self.optimizer,
            schedule=schedule,
            store=store,
            scheduler=self.scheduler,
            generators={"own": self.generator},
            extra=self.extra,
            metadata={"note": "kept"},
            retention=checkflow.Retention(last=1),
            notify=lambda _: None,
            tell=lambda _: None,
        ) as ckpt:
            begun = ckpt.restore()
            for _ in range(begun, until):
                self.iterate()
                self.draw()
                ckpt.step()
                self.losses.append(self.hidden.sum().item() + self.batch["x"].sum().item())
            assert not begun or ckpt.metadata == {"note": "kept"}
        return begun


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, compiled in (("compiled", True), ("plain", False)):
        torch.manual_seed(0)
        traced = trace_training(lambda compiled=compiled: Run(compiled=compiled).training(), model="run.py")  # type: ignore[misc]
        answer = compile_graph(retime(traced.graph, load_profile("rtx3090")), Options(100_000_000, interval=None))
        assert isinstance(answer, Compiled)
        write_graph(folder / f"{name}.graph.json", answer.graph)
        write_schedule(folder / f"{name}.schedule.json", answer.schedule)
    run, store = Run(compiled=True), folder / "store"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    run.train(folder / "plain.schedule.json", store, DONE)
    (store / "lock").unlink()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Before, and for other tests after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run(tmp_path: Path) -> tuple[Run, Path]:
    shutil.copytree(HERE / "store", tmp_path / "store")
    return Run(compiled=True, fresh=1), tmp_path / "store"


@pytest.mark.parametrize("name", ["compiled", "plain"])
def test_graphs_and_schedules_are_read_and_verified(name: str) -> None:
    graph, schedule = read_graph(HERE / f"{name}.graph.json"), read_schedule(HERE / f"{name}.schedule.json")
    verify(schedule, graph)
    inside = [view.name for row in schedule.state for view in row.views if "_orig_mod" in view.name]
    assert bool(inside) == (name == "compiled")


@pytest.mark.parametrize("name", ["compiled", "plain"])
def test_schedules_are_attached_and_checkpoints_restored(name: str, run: tuple[Run, Path]) -> None:
    """Under either names of a compiled model; each tensor has the bytes of the file that holds it."""
    made, store = run
    assert made.train(HERE / f"{name}.schedule.json", store, DONE) == DONE
    (kept,) = [path.parent for path in (HERE / "store").rglob("model.0.safetensors")]
    assert_are(made.models[0].state_dict(), load_file(kept / "model.0.safetensors"))
    assert_are(made.models[1].state_dict(), load_file(kept / "model.1.safetensors"))
    assert_are(made.ema.state_dict(), load_file(kept / "extra.ema.safetensors"))
    assert_are({"tensor": made.hidden}, load_file(kept / "extra.hidden.safetensors"))
    assert_are(made.batch, load_file(kept / "extra.batch.safetensors"))
    moments = load_file(kept / "optimizer.safetensors")
    for index, model in enumerate(made.models):
        for path, parameter in model.named_parameters():
            state = made.optimizer.state[parameter]
            stem = f"model.{index}/{path}" if f"model.{index}/{path}.exp_avg" in moments else path
            assert torch.equal(state["exp_avg"], moments.pop(f"{stem}.exp_avg"))
            assert torch.equal(state["exp_avg_sq"], moments.pop(f"{stem}.exp_avg_sq"))
            assert torch.equal(state["max_exp_avg_sq"], moments.pop(f"{stem}.max_exp_avg_sq"))
            assert state["step"] == DONE
    assert not moments
    assert made.scheduler.last_epoch == DONE


def test_a_run_goes_on_as_it_would_have(run: tuple[Run, Path], tmp_path: Path) -> None:
    """The drawn numbers of the iterations after the checkpoint are those of a run that never stopped."""
    made, store = run
    whole = Run(compiled=False)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    whole.train(HERE / "plain.schedule.json", tmp_path / "other", DONE + 2)
    made.train(HERE / "compiled.schedule.json", store, DONE + 2)
    assert made.losses == whole.losses[DONE:]


def test_a_compiled_model_is_traced_under_the_names_of_what_was_compiled() -> None:
    """And so to the same schedule."""
    made = []
    for compiled in (True, False):
        torch._dynamo.reset()
        graph = trace_training(lambda: Run(compiled=compiled).training(), model="run.py").graph  # noqa: B023
        answer = compile_graph(retime(graph, load_profile("rtx3090")), Options(100_000_000, interval=None))
        assert isinstance(answer, Compiled)
        made.append(answer.schedule)
    assert made[0] == made[1]


def test_a_part_that_was_compiled_keeps_the_names_of_state_dict(tmp_path: Path) -> None:
    """As checkpoints of earlier versions have them, so it is not attached uncompiled."""

    def build(compiled: bool) -> Training:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if compiled:
            model[0] = wrapped(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def iterate() -> None:
            torch.autograd.backward(model(torch.ones(2, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, iterate)

    graph = trace_training(lambda: build(True), model="run.py").graph
    answer = compile_graph(retime(graph, load_profile("rtx3090")), Options(100_000_000, interval=None))
    assert isinstance(answer, Compiled)
    names = {view.name for row in answer.schedule.state for view in row.views}
    assert "model/0._orig_mod.weight" in names
    for compiled in (True, False):
        made = build(compiled)
        as_traced = (
            contextlib.nullcontext()
            if compiled
            else pytest.raises(InputError, match=r"^model/0\._orig_mod\.weight: in the schedule")
        )
        with (
            as_traced,
            checkflow.attach(
                made.model, made.optimizer, schedule=answer.schedule, store=tmp_path / "store", tell=lambda _: None
            ) as ckpt,
        ):
            made.iteration()
            ckpt.step()


def assert_are(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A file has one name of tied tensors."""
    assert expected and found.keys() >= expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


if __name__ == "__main__":
    write(Path(sys.argv[1]))
