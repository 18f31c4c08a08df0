"""Whatever container the finder of unlisted state walks into can be listed as it is named, and a resume has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkflow
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.compiler import Compiled, Options, compile_graph
from checkflow.errors import InputError
from checkflow.schedule import Schedule
from checkflow.store.trainer.persist_every import PersistEvery
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

Kept = Any  # a container of tensors
KINDS: dict[str, Callable[[list[torch.Tensor]], Kept]] = {
    "dict": lambda rows: dict(zip("ab", rows, strict=True)),
    "list": list,
    "tuple": tuple,
    "deque": lambda rows: deque(rows, maxlen=2),
}
WAYS: dict[str, Callable[[Life], object]] = {
    "itself": lambda life: life.kept,
    "in a dict": lambda life: life.held,
    "Variables": lambda life: checkflow.Variables(vars(life), "kept"),
}


class Life:
    """Each iteration learns from what the two before it have left, and leaves a row itself."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.kept: Kept = KINDS[kind]([torch.ones(3), torch.zeros(3)])
        self.held: dict[str, Kept] = {"kept": self.kept}

    def rows(self) -> list[torch.Tensor]:
        return list(self.kept.values() if isinstance(self.kept, dict) else self.kept)

    def iteration(self) -> None:
        rows = self.rows()
        self.model(torch.stack(rows)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        new = rows[0] * 0.5 + rows[1] + 1
        if isinstance(self.kept, deque):
            self.kept.append(new)
        elif isinstance(self.kept, dict):
            self.kept |= {"a": rows[1], "b": new}
        elif isinstance(self.kept, list):
            self.kept[:] = [rows[1], new]
        else:
            self.kept = self.held["kept"] = (rows[1], new)

    def attach(self, schedule: Schedule, store: Path, extra: dict[str, object]) -> Checkpointer:
        return checkflow.attach(
            self.model,
            self.optimizer,
            schedule=schedule,
            store=store,
            extra=extra,
            when_full="wait",
            persist_every=PersistEvery(iterations=1),
            notify=lambda _: None,
        )


def compiled(kind: str, way: str = "") -> Schedule:
    def factory() -> Training:
        life = Life(kind)
        return Training(life.model, life.optimizer, life.iteration, {"kept": WAYS[way](life)} if way else {})

    graph = trace_training(factory, model="m", real=True, measure=True).graph
    answer = compile_graph(graph, Options(bandwidth_bytes_per_s=10**9))
    assert isinstance(answer, Compiled)
    return answer.schedule


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_named_can_be_listed_and_goes_on(kind: str, tmp_path: Path) -> None:
    bare = compiled(kind)
    names = {row.name.removeprefix("self.") for row in bare.unlisted}
    assert names and {name.partition(".")[0] for name in names} <= {"kept", "held"}, names
    assert kind != "deque" or names == {"kept"}, "no item, which moves on"
    for way in WAYS if kind != "tuple" else ("Variables",):  # which is another one each time
        assert not compiled(kind, way).unlisted, way
        whole, first, second = Life(kind), Life(kind), Life(kind)
        for _ in range(7):
            whole.iteration()
        with first.attach(bare, tmp_path / way, {"kept": WAYS[way](first)}) as ckpt:
            for _ in range(4):
                first.iteration()
                ckpt.step()
        with second.attach(bare, tmp_path / way, {"kept": WAYS[way](second)}) as ckpt:
            assert ckpt.restore() == 4
            if way == "in a dict":
                second.kept = second.held["kept"]
            for _ in range(3):
                second.iteration()
                ckpt.step()
        assert type(second.kept) is type(whole.kept) and getattr(second.kept, "maxlen", 2) == 2
        assert all(map(torch.equal, second.rows(), whole.rows()))
        assert torch.equal(second.model.weight, whole.model.weight)


class Memory(deque[int]):
    def __init__(self) -> None:
        super().__init__(maxlen=4)
        self.seen = 0


class Slotted(list[int]):
    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = 0


class Noted(dict[str, int]):
    def __init__(self) -> None:
        super().__init__(a=1)
        self.best = 0.0


class ByName(dict[str, object]):
    """Its attributes are its items."""

    def __init__(self) -> None:
        super().__init__(a=1)
        self.__dict__ = self


class Plain(deque[int]):
    pass


class Giving(Memory):
    def state_dict(self) -> dict[str, object]:
        return {"items": list(self), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self.extend(state["items"])
        self.seen = state["seen"]


@pytest.mark.parametrize(("kind", "more"), [(Memory, "seen"), (Slotted, "place"), (Noted, "best")])
def test_a_container_that_has_more_than_its_items_is_refused(kind: type, more: str, tmp_path: Path) -> None:
    """A restore would leave that out."""
    with pytest.raises(
        InputError, match=rf"^extra\.kept: a {kind.__name__} has more than its items \('{more}'\); give"
    ):
        Life("list").attach(compiled("list"), tmp_path / "store", {"kept": kind()})


@pytest.mark.parametrize("kind", [ByName, Plain, Giving])
def test_one_of_a_class_of_its_own_is_taken_where_that_is_all(kind: type, tmp_path: Path) -> None:
    life, bare, kept, found = Life("list"), compiled("list"), kind(), kind()
    with life.attach(bare, tmp_path / "store", {"rows": life.kept, "kept": kept}) as ckpt:
        life.iteration()
        if isinstance(kept, deque):
            kept.append(3)
        else:
            kept["b"] = 2
        if isinstance(kept, Giving):
            kept.seen = 5
        ckpt.step()
    again = Life("list")
    with again.attach(bare, tmp_path / "store", {"rows": again.kept, "kept": found}) as ckpt:
        assert ckpt.restore() == 1
    assert found == kept and getattr(found, "seen", 5) == 5 and getattr(found, "b", 2) == 2


def test_a_deque_that_takes_fewer_items_is_refused(tmp_path: Path) -> None:
    """None is dropped unsaid. One that takes more is the user's own choice."""
    life, bare = Life("deque"), compiled("deque")
    with life.attach(bare, tmp_path / "store", {"kept": life.kept}) as ckpt:
        life.iteration()
        ckpt.step()
    longer: deque[torch.Tensor] = deque(maxlen=3)
    with Life("list").attach(bare, tmp_path / "store", {"kept": longer}) as ckpt:
        assert ckpt.restore() == 1
    assert len(longer) == 2 and longer.maxlen == 3
    with (
        Life("list").attach(bare, tmp_path / "store", {"kept": deque(maxlen=1)}) as ckpt,
        pytest.raises(InputError, match=r"extra\.kept: has 2 items in the checkpoint, and takes 1; make its maxlen"),
    ):
        ckpt.restore()
