"""What attach says of state that nobody listed, what it takes as extra, and what it refuses."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.checkpointing.listing import carried, drawn_by_cudnn, missing
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import AuditError, InputError
from checkflow.schedule import Schedule, read_schedule, write_schedule
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace.tracing import trace_training
from checkflow.training import Training


class Life:
    """A layer, its moving average, and a scheduler that keeps a large table."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.ema = AveragedModel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def iteration(self) -> None:
        self.model(torch.randn(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)

    def attach(self, schedule: Schedule, store: Path, told: list[str], **options: object) -> Checkpointer:
        return checkflow.attach(
            self.model,
            self.optimizer,
            schedule=schedule,
            store=store,
            when_full="wait",
            persist_every=PersistEvery(iterations=1),
            notify=told.append,
            **options,  # type: ignore[arg-type]
        )


def compiled(*, listed: bool) -> Schedule:
    def factory() -> Training:
        life = Life()
        return Training(life.model, life.optimizer, life.iteration, {"ema": life.ema} if listed else {})

    graph = trace_training(factory, model="m", real=True, measure=True).graph
    answer = compile_graph(graph, Options(bandwidth_bytes_per_s=10**9))
    assert isinstance(answer, Compiled)
    return answer.schedule


class Count(torch.nn.Module):
    """Keeps what it counts as metrics do: in attributes, which it adds to its state_dict by itself, if at all."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.seen = torch.zeros(3)
        self.persistent = persistent

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, _: bool) -> None:
        if self.persistent:
            destination[prefix + "seen"] = self.seen

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        self.seen = state_dict[prefix + "seen"]

    def count(self) -> None:
        self.seen = self.seen + torch.arange(3.0)


@pytest.fixture(scope="module")
def bare() -> Schedule:
    return compiled(listed=False)


@pytest.fixture(scope="module")
def full() -> Schedule:
    return compiled(listed=True)


def test_a_schedule_names_what_nobody_listed(bare: Schedule, full: Schedule, tmp_path: Path) -> None:
    assert not full.unlisted
    rows = {row.name: row.bytes for row in bare.unlisted}
    assert rows == {"self.ema.module.weight": 64, "self.ema.module.bias": 16, "self.ema.n_averaged": 8}
    assert all(Path(row.where.partition(":")[0]) == Path(__file__) for row in bare.unlisted)
    write_schedule(tmp_path / "bare.json", bare)
    assert read_schedule(tmp_path / "bare.json") == bare


def test_attach_says_what_is_missing_and_what_to_do(bare: Schedule, tmp_path: Path) -> None:
    told: list[str] = []
    life = Life()
    life.attach(bare, tmp_path / "store", told).close()
    [line] = told
    assert line.startswith("self.ema.") and "and 2 more (88 B, written at " in line
    assert line.endswith("in no checkpoint; list it: attach(extra={...})")
    with pytest.raises(AuditError, match=r"^audit: self\.ema"):
        life.attach(bare, tmp_path / "other", told, audit=True)


def test_what_a_schedule_has_hides_nothing_that_is_like_it(bare: Schedule, full: Schedule) -> None:
    """Of two averages the one that was listed when it was compiled is not the other."""
    life = Life()
    listed = Training(life.model, life.optimizer, life.iteration, {"ema": life.ema}).listed
    other = [replace(one, name=one.name.replace("self.ema", "self.slow")) for one in carried(bare)]
    assert not missing(other, listed, set(), scaler=False, schedule=bare), "it may be the same by another name"
    [line] = missing(other, listed, set(), scaler=False, schedule=full)
    assert line.startswith("self.slow.")


def test_what_is_found_again_is_told_once(bare: Schedule) -> None:
    """As where an iteration is recorded again, and another line writes it."""
    life, told = Life(), set[str]()
    listed = Training(life.model, life.optimizer, life.iteration).listed
    found = carried(bare)
    assert len(missing(found, listed, told, scaler=False)) == 1
    again = [*(replace(one, where="") for one in found), replace(found[0], name="self.ema.other")]
    [line] = missing(again, listed, told, scaler=False)
    assert line.startswith("self.ema.other (") and not missing(again, listed, told, scaler=False)


@pytest.mark.parametrize("key", ["ema", "renamed"])
def test_what_is_listed_only_at_attach_is_read_at_the_end_and_said(bare: Schedule, key: str, tmp_path: Path) -> None:
    told: list[str] = []
    life = Life()
    with life.attach(bare, tmp_path / "store", told, extra={key: life.ema}) as ckpt:
        life.iteration()
        ckpt.step()
    [line] = told
    assert line.startswith(f"extra.{key}: not in the schedule, so read when each iteration ends")
    other = Life()
    with other.attach(bare, tmp_path / "store", told, extra={key: other.ema}) as ckpt:
        assert ckpt.restore() == 1
        kept = other.ema.state_dict()
        assert all(torch.equal(kept[name], value) for name, value in life.ema.state_dict().items())
        assert int(other.ema.n_averaged) == 1


def test_what_the_schedule_knows_is_planned_and_nothing_is_said(full: Schedule, tmp_path: Path) -> None:
    told: list[str] = []
    life = Life()
    with life.attach(full, tmp_path / "store", told, extra={"ema": life.ema}, audit=True) as ckpt:
        for _ in range(3):
            life.iteration()
            ckpt.step()
        assert not told and not ckpt._executor.bound.loose
    with pytest.raises(InputError, match=r'^extra.ema: in the schedule; list it: attach\(extra=\{"ema": ...\}\)$'):
        life.attach(full, tmp_path / "other", told)


def test_a_checkpoint_from_before_an_extra_was_listed_is_taken_and_said(bare: Schedule, tmp_path: Path) -> None:
    told: list[str] = []
    life = Life()
    with life.attach(bare, tmp_path / "store", told) as ckpt:
        life.iteration()
        ckpt.step()
    told.clear()
    with life.attach(bare, tmp_path / "store", told, extra={"ema": life.ema}) as ckpt:
        assert ckpt.restore() == 1
        assert told[-1].endswith("extra.ema is not in this checkpoint; it stays as it is")
        life.iteration()
        ckpt.step()
    with (
        life.attach(bare, tmp_path / "store", told) as ckpt,
        pytest.raises(InputError, match=r"^extra\.ema: is in the checkpoint; list it"),
    ):
        ckpt.restore()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rows": (1, 2)}, "^extra.rows: a tuple cannot be taken; give a module, a tensor, a dict"),
        ({"a/b": {}}, "^extra: 'a/b' cannot be a file's name"),
        ({"g": torch.Generator()}, r"^extra.g: a torch.Generator .* give it in generators="),
        ({"h": {"x": torch.eye(2).to_sparse()}}, "^extra.h/x: layout torch.sparse_coo is not supported"),
        ({"h": {"f": print}}, "^extra.h.f: a function cannot be saved"),
        (
            {"m": Count(persistent=False)},
            r"^extra\.m: a Count that gives no state; leave it out",
        ),
        ([1], "^extra: is a list; give a dict"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(
    bare: Schedule, extra: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        Life().attach(bare, tmp_path / "store", [], extra=extra)


def generators() -> dict[str, Any]:
    """Of NumPy's and Python's, one of each kind."""
    return {
        "pcg": np.random.default_rng(1),
        "twister": np.random.Generator(np.random.MT19937(2)),
        "philox": np.random.Generator(np.random.Philox(3)),
        "older": np.random.RandomState(4),
        "python": random.Random(5),
    }


def draws(given: dict[str, Any]) -> list[float]:
    """A normal of each, of which some keep a second one for later."""
    return [one.gauss() if isinstance(one, random.Random) else float(one.normal()) for one in given.values()]


def test_generators_of_numpy_and_python_go_on(bare: Schedule, tmp_path: Path) -> None:
    """Where they were when the checkpoint was taken. One of another kind is refused by its name."""
    first, life = generators(), Life()
    with life.attach(bare, tmp_path / "store", [], extra=first) as ckpt:
        draws(first)
        life.iteration()
        ckpt.step()
    expected = [draws(first) for _ in range(3)]
    second = generators()
    with life.attach(bare, tmp_path / "store", [], extra=second) as ckpt:
        assert ckpt.restore() == 1
        assert [draws(second) for _ in range(3)] == expected
    other = generators() | {"pcg": np.random.Generator(np.random.SFC64(1))}
    with (
        life.attach(bare, tmp_path / "store", [], extra=other) as ckpt,
        pytest.raises(
            InputError, match=r"extra\.pcg: .*a Generator of SFC64, Generator of PCG64 in the checkpoint; use"
        ),
    ):
        ckpt.restore()


def test_where_a_generator_of_numpys_goes_is_said(bare: Schedule, tmp_path: Path) -> None:
    """Which is neither among torch's generators nor within a dict."""
    rng = np.random.default_rng()
    with pytest.raises(InputError, match=r"^generator\.rng: is a Generator; give it in extra=\{'rng': \.\.\.\}$"):
        Life().attach(bare, tmp_path / "store", [], generators={"rng": rng})
    with pytest.raises(InputError, match=r"^extra\.h\.rng: a numpy\..*Generator cannot be saved here; list it by"):
        Life().attach(bare, tmp_path / "store", [], extra={"h": {"rng": rng}})
    with pytest.raises(InputError, match=r"^extra\.rng: a SystemRandom cannot be taken"):
        Life().attach(bare, tmp_path / "store", [], extra={"rng": random.SystemRandom()})


def test_a_tensor_too_large_for_the_record_that_no_file_has_room_for_is_refused(bare: Schedule, tmp_path: Path) -> None:
    life, held = Life(), dict[str, object]()
    no_room = pytest.raises(InputError, match=r"^extra.held/x: .* no file has room for it; fill it before attach")
    with no_room, life.attach(bare, tmp_path / "store", [], extra={"held": held}) as ckpt:
        life.iteration()
        held["x"] = torch.zeros(2**22 + 1)
        ckpt.step()


def test_variables_of_a_script_are_set_again(bare: Schedule, tmp_path: Path) -> None:
    """As what they are replaced by; others stay."""
    script: dict[str, object] = {"batch": torch.zeros(2), "best": 1e9, "other": 1}
    life = Life()
    with life.attach(
        bare, tmp_path / "store", [], extra={"loop": checkflow.Variables(script, "batch", "best")}
    ) as ckpt:
        for i in range(3):
            life.iteration()
            script["batch"], script["best"] = torch.full((2,), float(i)), i / 2
            ckpt.step()
    again: dict[str, object] = {"batch": None, "best": None, "other": 2}
    with Life().attach(
        bare, tmp_path / "store", [], extra={"loop": checkflow.Variables(again, "batch", "best")}
    ) as ckpt:
        assert ckpt.restore() == 3
    assert str(again) == "{'batch': tensor([2., 2.]), 'best': 1.0, 'other': 2}"


def test_variables_that_cannot_be_set_again_are_refused() -> None:
    batch = 1
    with pytest.raises(InputError, match=r"^Variables: a function's locals\(\) cannot be set; keep them in a dict"):
        checkflow.Variables(locals(), "batch")
    with pytest.raises(InputError, match=r"^Variables: there is no 'absent' yet"):
        checkflow.Variables(globals(), "absent")
    with pytest.raises(InputError, match=r"^Variables: names none"):
        checkflow.Variables({"b": batch})


def test_a_module_that_adds_to_its_state_dict_is_asked_for_it(bare: Schedule, tmp_path: Path) -> None:
    """As a metric does whose state is persistent: no buffer of its has what it counts."""

    def seen(until: int) -> torch.Tensor:
        life, metric = Life(), torch.nn.ModuleDict({"count": Count()})
        with life.attach(bare, tmp_path / "store", [], extra={"metric": metric}) as ckpt:
            for _ in range(ckpt.restore(), until):
                life.iteration()
                metric["count"].count()  # type: ignore[operator]
                ckpt.step()
        return metric["count"].seen  # type: ignore[return-value]

    assert seen(2).tolist() == [0, 2, 4]
    assert seen(5).tolist() == [0, 5, 10]


def test_what_a_model_adds_to_its_state_dict_is_said_unless_it_is_listed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Count())
    optimizer = torch.optim.SGD(model.parameters())
    told: list[str] = []
    checkflow.attach(model, optimizer, store=tmp_path / "one", notify=told.append).close()
    line = (
        "model: its state_dict() gives '1.seen', no parameter or buffer, and in no checkpoint; list the module that has"
    )
    assert sum(line in each for each in told) == 1
    told.clear()
    checkflow.attach(model, optimizer, store=tmp_path / "two", notify=told.append, extra={"count": model[1]}).close()
    assert not any("state_dict" in each for each in told)


class Table:
    """A scheduler with tensors of any size."""

    def __init__(self, scale: float) -> None:
        self.rates = torch.arange(2**19) * scale  # 2 MiB
        self.at = 0

    def state_dict(self) -> dict[str, object]:
        return {"rates": self.rates, "at": self.at}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.rates, self.at = state_dict["rates"], state_dict["at"]  # type: ignore[assignment]


def test_a_schedulers_large_tensors_go_to_a_file(bare: Schedule, tmp_path: Path) -> None:
    life, table = Life(), Table(1.0)
    with life.attach(bare, tmp_path / "store", [], scheduler=table) as ckpt:
        for _ in range(2):
            life.iteration()
            table.rates = table.rates + 1
            table.at += 1
            ckpt.step()
    [newest] = sorted((tmp_path / "store").glob("*-iteration-2"))
    assert (newest / "scheduler.safetensors").stat().st_size > 2**21
    other = Table(0.0)
    with Life().attach(bare, tmp_path / "store", [], scheduler=other) as ckpt:
        assert ckpt.restore() == 2
    assert torch.equal(other.rates, table.rates) and other.at == 2


def test_metadata_is_read_back(bare: Schedule, tmp_path: Path) -> None:
    life, metadata = Life(), {"best": 9.0}
    with life.attach(bare, tmp_path / "store", [], metadata=metadata) as ckpt:
        assert ckpt.restore() == 0 and ckpt.metadata == {}
        life.iteration()
        metadata["best"] = 1.0
        ckpt.step()
    with Life().attach(bare, tmp_path / "store", []) as ckpt:
        ckpt.restore()
        assert ckpt.metadata == {"best": 1.0}


class Drops(nn.Module):
    """Recurrent layers of which two drop out between their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.LSTM(4, 4, 1, dropout=0.0)
        self.two = nn.LSTM(4, 4, 2, dropout=0.5)
        self.three = nn.GRU(4, 4, 3, dropout=0.1)


def test_dropout_that_only_cudnn_knows_of_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, and where cuDNN is used."""
    models: dict[str, nn.Module] = {"model": Drops(), "model.1": nn.LSTM(4, 4, 2)}
    assert not list(drawn_by_cudnn(models))
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    (line,) = drawn_by_cudnn(models)
    assert line.startswith("model/two and 1 more: cuDNN draws its dropout from a state that nobody can read")
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert not list(drawn_by_cudnn(models))


RECURRENT = """
import hashlib, sys
import torch, checkflow
torch.manual_seed(0)
model = torch.nn.LSTM(32, 32, 2, dropout=0.5).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with checkflow.attach(model, optimizer, store=sys.argv[1]) as ckpt:
    for iteration in range(ckpt.restore(), int(sys.argv[2])):
        x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(iteration)).cuda()
        torch.autograd.backward(model(x)[0].square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
held = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
print(hashlib.sha256(held).hexdigest())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_that_only_cudnn_knows_of_is_told_on_cuda(tmp_path: Path) -> None:
    """Resumed in another process it ends elsewhere; within one process the generator's state is enough."""
    model, told = Drops().cuda(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with checkflow.attach(model, optimizer, store=tmp_path / "store", notify=told.append, tell=told.append):
        pass
    assert any("model/two and 1 more: cuDNN draws" in line for line in told), told
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    ends = [
        subprocess.run([sys.executable, "-c", RECURRENT, store, str(until)], capture_output=True, text=True, check=True)
        for store, until in ((whole, 6), (parted, 3), (parted, 6))
    ]
    assert ends[0].stdout != ends[2].stdout
