"""What a training carries beside models and optimizers is resumed too, bit for bit, once it is listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from test_resume_equality import bits, seed
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import checkflow
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.schedule import Schedule
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

LENGTH = 6


class Shadow:
    """A moving average with state_dict and load_state_dict, as diffusers' EMAModel: lists of tensors, and numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        self.steps += 1
        for mean, new in zip(self.shadow, model.parameters(), strict=True):
            mean.data.lerp_(new.detach(), 1 / (1 + self.steps))

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "shadow": self.shadow, "none": None}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.steps, self.shadow = state_dict["steps"], state_dict["shadow"]  # type: ignore[assignment]


@dataclass
class Life:
    """A recurrent model with a carried hidden state, a batch fetched ahead, two averages and a running total."""

    lengths: tuple[int, ...] = (4,)  # of batches, drawn
    filled: bool = True  # the dict has a batch and a state from the start
    seen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 3)
        self.model = nn.ModuleList([self.cell, self.head])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.ema = AveragedModel(self.model)
        self.shadow = Shadow(self.model)
        self.total = torch.zeros(3)
        self.held: dict[str, object] = {"epoch": 0}
        if self.filled:
            self.held |= {"x": self.fetch(), "hidden": torch.zeros(4, 5)}

    def fetch(self) -> Tensor:
        return torch.randn(self.lengths[int(torch.randint(len(self.lengths), ()))], 4, 3)

    @property
    def extra(self) -> dict[str, object]:
        return {"ema": self.ema, "shadow": self.shadow, "total": self.total, "held": self.held}

    def iteration(self) -> None:
        x = self.held.get("x")
        hidden = self.held.get("hidden")
        if not isinstance(x, Tensor):
            x = self.fetch()
        if not isinstance(hidden, Tensor):
            hidden = torch.zeros(4, 5)
        self.held["x"] = self.fetch()
        for part in x:
            hidden = self.cell(part, hidden)
        loss = self.head(hidden).square().mean()
        loss.backward()
        self.held["hidden"] = hidden.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)
        self.shadow.update(self.model)
        self.total += loss.detach()
        self.held["epoch"] += 1  # type: ignore[operator]
        self.seen.append(loss.detach())

    def end(self) -> dict[str, object]:
        found: dict[str, object] = {f"model {k}": bits(v) for k, v in self.model.state_dict().items()}
        found |= {f"ema {k}": bits(v) for k, v in self.ema.state_dict().items()}
        found |= {f"shadow {k}": bits(v) for k, v in enumerate(self.shadow.shadow)}
        found |= {k: bits(v) if isinstance(v, Tensor) else v for k, v in self.held.items()}
        return found | {"total": bits(self.total), "steps": self.shadow.steps, "last": bits(self.seen[-1])}


def schedule_of(*, listed: bool, lengths: tuple[int, ...] = (4,), filled: bool = True) -> Schedule:
    def factory() -> Training:
        life = Life(lengths[:1], filled)
        return Training(life.model, life.optimizer, life.iteration, life.extra if listed else {})

    seed(0)
    answer = compile_graph(
        trace_training(factory, model="m", real=True, measure=True).graph, Options(bandwidth_bytes_per_s=10**9)
    )
    assert isinstance(answer, Compiled)
    return answer.schedule


def run(life: Life, schedule: Schedule, store: Path, until: int, told: list[str], **options: object) -> int:
    with checkflow.attach(
        life.model,
        life.optimizer,
        schedule=schedule,
        store=store,
        extra=life.extra,
        when_full="wait",
        persist_every=PersistEvery(iterations=1),
        notify=told.append,
        **options,  # type: ignore[arg-type]
    ) as ckpt:
        begun = ckpt.restore()
        for _ in range(begun, until):
            life.iteration()
            ckpt.step()
    return begun


@pytest.mark.parametrize("listed", [True, False], ids=["planned", "unplanned"])
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "empty"])
@pytest.mark.parametrize("lengths", [(4,), (4, 2, 7)], ids=["one length", "lengths"])
def test_what_is_listed_as_extra_is_resumed(
    listed: bool, filled: bool, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Without checkflow in one go; with it in two lives, the second from other numbers."""
    schedule = schedule_of(listed=listed, lengths=lengths, filled=filled)
    seed(1)
    whole = Life(lengths, filled)
    for _ in range(LENGTH):
        whole.iteration()
    expected = whole.end()
    told: list[str] = []
    seed(1)
    assert run(Life(lengths, filled), schedule, tmp_path / "store", 3, told) == 0
    seed(2)
    second = Life(lengths, filled)
    assert run(second, schedule, tmp_path / "store", LENGTH, told) == 3
    assert second.end() == expected


def test_what_lies_otherwise_in_memory_does_so_again(tmp_path: Path) -> None:
    """In a file of the checkpoint, in its record, and an array; each is as it was, and what is computed of it too."""

    def made(number: float) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, object]]:
        model = nn.Linear(3, 2)
        wide = torch.full((5, 7), number).t()
        array = np.asfortranarray(np.full((4, 3), number, np.float32))
        return model, torch.optim.SGD(model.parameters(), 0.1), {"basis": wide, "array": array}

    model, optimizer, held = made(1.0)
    with checkflow.attach(model, optimizer, store=tmp_path, extra={"held": held}) as ckpt:
        assert ckpt.restore() == 0
        for number in range(2):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            held["late"] = (
                torch.arange(6.0 + 2 * number).reshape(2, -1).t()
            )  # of another shape each time: to the record
            ckpt.step()
    model, optimizer, again = made(2.0)
    with checkflow.attach(model, optimizer, store=tmp_path, extra={"held": again}) as ckpt:
        assert ckpt.restore() == 2
    basis, late, array = again["basis"], again["late"], again["array"]
    assert isinstance(basis, Tensor) and torch.equal(basis, torch.ones(7, 5)) and basis.stride() == (1, 7)
    assert isinstance(late, Tensor) and isinstance(held["late"], Tensor)
    assert torch.equal(late, held["late"]) and late.stride() == held["late"].stride() != (2, 1)
    assert isinstance(array, np.ndarray) and array.flags.f_contiguous and (array == 1).all()
