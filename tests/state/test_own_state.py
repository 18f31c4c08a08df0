"""What an optimizer keeps under a text, and not of a parameter: saved and restored with all else, or refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import counted
import pytest
import torch
from counted import Counted
from test_resume_equality import LENGTH, advance, final, seed
from test_resume_through_store import attached, compiled, go, traceable
from torch import nn
from trainings_to_resume import TRAININGS

import checkflow
from checkflow.distributed.own_alike import require_own_alike
from checkflow.errors import FormatError, InputError
from checkflow.state.host.record import OptimizerRecord, OwnRecord
from checkflow.state.live import live_state
from checkflow.state.restore.files import FileTensor, TensorFile
from checkflow.state.restore.own import match_own
from checkflow.state.restore.rebuild import written
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.training import Training


def life(*arguments: object, ends: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, counted.__file__, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ends, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("killed", [1, 9])
def test_a_killed_training_ends_as_one_that_was_not(killed: int, tmp_path: Path) -> None:
    """By the provisional schedule, and by the one that was learned."""
    store = tmp_path / "store"
    life(store, 12, killed, ends=-signal.SIGKILL)
    assert life(store, 12) == life("", 12)


@pytest.mark.filterwarnings("ignore:optimizer/.state.anew. replaced in each iteration")
def test_a_schedule_that_was_compiled_has_it(tmp_path: Path) -> None:
    make = TRAININGS["counted"]
    schedule = compiled(traceable(make))
    names = {view.name for row in schedule.state for view in row.views}
    assert {"optimizer/.state.in place", "optimizer/.state.trust.sum"} <= names
    seed(1)
    whole = make()
    advance(whole, LENGTH)
    expected = final(whole)
    for number, until in ((1, 3), (2, LENGTH)):
        seed(number)
        run = make()
        with attached(run.training, run.objects, schedule, tmp_path / "store") as ckpt:
            go(run, ckpt, until)
    assert final(run) == expected


@pytest.mark.parametrize("policy", ["rolling", "lowdiff"])
def test_updates_that_are_made_again_leave_it(policy: str, tmp_path: Path) -> None:
    """It is as it was at the checkpoint's end, whatever is rebuilt of parameters."""
    expected = ""
    for begins, ends in ((0, 12), (12, 13)):
        torch.manual_seed(begins)
        model, made = optimizer(k=0, t=torch.zeros(3))
        with checkflow.attach(
            model, made, store=tmp_path, policy=policy, when_full="wait", tell=lambda _: None,
            persist_every=PersistEvery(iterations=1),
        ) as ckpt:  # fmt: skip
            assert ckpt.restore() == begins
            own: dict[object, object] = made.state  # type: ignore[assignment]
            everything = [*model.parameters(), *map(made.state.get, model.parameters()), own["k"], own["t"]]
            assert begins == 0 or repr(counted.said_of(everything, [])) == expected
            for _ in range(begins, ends):
                iterate(model, made)
                own["k"] += 1  # type: ignore[operator]
                own["t"].add_(1.5)  # type: ignore[attr-defined]
                ckpt.step()
            everything = [*model.parameters(), *map(made.state.get, model.parameters()), own["k"], own["t"]]
            expected = repr(counted.said_of(everything, []))


def optimizer(**own: object) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made.state.update(own)  # type: ignore[arg-type]
    return model, made


def iterate(model: nn.Module, made: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    made.step()
    made.zero_grad()


@pytest.mark.parametrize(
    "value", [0, 1.5, True, "text", None, torch.tensor(3), torch.zeros(2, 3).t(), {"n": 1}, [1, (2,)]]
)
def test_each_kind_goes_through_a_checkpoint(value: object, tmp_path: Path) -> None:
    model, made = optimizer(k=value)
    with checkflow.attach(model, made, store=tmp_path, tell=lambda _: None) as ckpt:
        iterate(model, made)
        ckpt.step()
        ckpt.save()
    again, other = optimizer()
    with checkflow.attach(again, other, store=tmp_path, tell=lambda _: None) as ckpt:
        assert ckpt.restore() == 1
        assert counted.said_of(other.state["k"], []) == counted.said_of(value, [])  # type: ignore[index]


def test_tensors_come_back_into_those_that_are_there(tmp_path: Path) -> None:
    """The optimizer may hold them elsewhere, too."""
    tensors = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    model, made = optimizer(k=tensors[0], nested={"n": [1, tensors[1], (tensors[2],)]})
    with checkflow.attach(model, made, store=tmp_path, tell=lambda _: None) as ckpt:
        iterate(model, made)
        ckpt.step()
        ckpt.save()
        for tensor in tensors:
            tensor.add_(1)
        ckpt.restore()
        own: dict[str, Any] = made.state  # type: ignore[assignment]
        assert own["k"] is tensors[0] and own["nested"]["n"][1] is tensors[1] and own["nested"]["n"][2][0] is tensors[2]
        assert all(tensor.tolist() == [0, 0] for tensor in tensors)


def test_what_was_not_there_goes_when_a_training_is_taken_back(tmp_path: Path) -> None:
    model, made = optimizer()
    with checkflow.attach(model, made, store=tmp_path, tell=lambda _: None) as ckpt:
        iterate(model, made)
        ckpt.step()
        ckpt.save()
        made.state["k"] = 1  # type: ignore[index]
        ckpt.restore()
        assert "k" not in made.state


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"k": object()}, r"^optimizer\.state of SGD: k: a object cannot be saved"),
        ({"k": {"in": torch.zeros(2, device="meta")}}, r"^optimizer/\.state\.k\.in: has no data yet"),
        (
            {"k": {torch.ones(2): 1}},
            r"^optimizer\.state: a tensor of shape \(2,\) is no parameter of its groups \(SGD\)",
        ),
        ({3: 1}, r"^optimizer\.state: the key 3 is no parameter of its groups, and no text \(SGD\); make it a text"),
        ({torch.ones(3): {}}, r"^optimizer\.state: a tensor of shape \(3,\) is no parameter of its groups \(SGD\)"),
        ({"a": {"b.c": torch.ones(2)}, "a.b": {"c": torch.ones(2)}}, r"a\.b\.c: two tensors of this training have"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_attach(own: dict[object, object], reason: str, tmp_path: Path) -> None:
    model, made = optimizer()
    made.state.update(own)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=reason):
        checkflow.attach(model, made, store=tmp_path)


def test_where_ranks_divide_the_state_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkflow.state.own.is_zero", lambda _: True)
    model, made = optimizer(k=1)
    with pytest.raises(InputError, match=r"^optimizer\.state of SGD: 'k' is kept under a text, for no parameter"):
        live_state(Training(model, made, lambda: None))


def part(count: int, tensor: float) -> SimpleNamespace:
    """Of a rank that kept a count and a tensor."""
    own = OwnRecord(values={"k": count, "t": {"$stored": ".state.t"}})
    record = OptimizerRecord(name="optimizer", type="SGD", file="optimizer.safetensors", groups=(), cohorts=(), own=own)
    data = memoryview(bytearray(torch.full((2,), tensor).numpy().tobytes()))
    file = written(TensorFile({".state.t": FileTensor(torch.float32, (2,), data)}, {}))
    said = SimpleNamespace(optimizers=(record,), replay=None, lanes=(), objects=(), state_dict=None)
    return SimpleNamespace(record=said, read=lambda _: file)


@pytest.mark.parametrize(("count", "tensor"), [(1, 2.0), (2, 1.0)])
def test_other_ranks_take_only_what_all_had_alike(count: int, tensor: float) -> None:
    require_own_alike(SimpleNamespace(ranks=(part(1, 1.0), part(1, 1.0)), size=2))  # type: ignore[arg-type]
    reason = r"^optimizer\.state of SGD: ranks 0 and 1 do not have alike what it keeps under a text \(k, t\)"
    with pytest.raises(InputError, match=reason):
        require_own_alike(SimpleNamespace(ranks=(part(1, 1.0), part(count, tensor)), size=2))  # type: ignore[arg-type]


def test_no_name_of_it_is_a_parameters() -> None:
    """A module that is called "state" has parameters with entries of their own."""
    model = nn.ModuleDict({"state": nn.Linear(2, 2)})
    made = Counted(model.parameters())
    torch.autograd.backward(model["state"](torch.ones(1, 2)).sum())
    made.step()
    made.own["weight"] = {"momentum_buffer": torch.ones(2)}
    names = [live.name for live in live_state(Training(model, made, lambda: None))]
    assert "optimizer/state.weight.momentum_buffer" in names
    assert "optimizer/.state.weight.momentum_buffer" in names
    assert "optimizer/.state.trust.model/state.weight" in names


def test_a_record_with_a_key_of_no_parameter_is_refused() -> None:
    own = OwnRecord(values={"k": {"$dict": [[{"$parameter": "model/a"}, 1]]}})
    record = OptimizerRecord(name="optimizer", type="SGD", file="", groups=(), cohorts=(), own=own)
    with pytest.raises(FormatError, match=r"k is of 'model/a', not in its groups"):
        match_own(record, {}, lambda value: value)
