"""Names are tied alike on every rank, though the part of one has no elements, and so no memory of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import checkflow
from checkflow.distributed import resharding
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark
from checkflow.distributed.parts import Complete
from checkflow.errors import CorruptStoreError
from checkflow.runtime.matching import rooms_of
from checkflow.state.host.record import ShardRecord
from checkflow.state.live import live_state
from checkflow.state.names import StateName
from checkflow.state.restore.files import FileTensor, TensorFile
from checkflow.trace import World, in_place_of


class Tied(torch.nn.Module):
    """Of two tied parameters of one row, and one more like them, divided among two ranks if there are."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 1, bias=False)
        self.second = torch.nn.Linear(4, 1, bias=False)
        self.other = torch.nn.Linear(4, 1, bias=False)
        self.bias = torch.nn.Parameter(torch.ones(2))
        if shared:
            mesh = init_device_mesh("cpu", (2,))
            for linear in (self.first, self.other):
                divided = distribute_tensor(linear.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                linear.weight = torch.nn.Parameter(divided)
        self.second.weight = self.first.weight

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_a_checkpoint_and_ties_the_same_names(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "here", lambda _deadline_s: Group.alone())
    with in_place_of(World(2, rank)):
        model = Tied(shared=True)
        part = model.first.weight
        assert isinstance(part, DTensor) and part.to_local().numel() == (0 if rank else 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        training = checkflow.Training(model, optimizer, lambda: None)
        tied = {room.name: room.alias_of for room in rooms_of(live_state(training)).values() if room.alias_of}
        assert tied == {"model/second.weight": "model/first.weight"}
        with checkflow.attach(model, optimizer, store=tmp_path, tell=lambda _: None, when_full="wait") as checkpointer:
            for _ in range(3):
                model.update(optimizer)
                checkpointer.step()
            assert checkpointer.restore(3) == 3


def test_parameters_without_elements_are_not_tied_by_their_lack_of_memory(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.empty(0, 4)) for name in "ab"})
    model["c"], model["d"] = model["a"], torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(2):
        with checkflow.attach(model, optimizer, store=tmp_path, tell=lambda _: None) as checkpointer:
            assert checkpointer.restore() == number
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpointer.step()


def stored(*rows: float) -> FileTensor:
    data = torch.tensor(rows)
    return FileTensor(data.dtype, tuple(data.shape), memoryview(bytearray(data.numpy().tobytes())))


def test_what_one_rank_stores_for_itself_another_may_have_as_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [StateName("model/a"), StateName("model/b")]

    def shards_of(number: int) -> dict[StateName, ShardRecord]:
        return {name: ShardRecord(shape=(2,), offsets=(number,), sizes=(1,)) for name in names}

    def rank(number: int) -> Any:
        checkpoint = SimpleNamespace(path=Path(f"rank-{number}"))
        return SimpleNamespace(
            number=number, checkpoint=checkpoint, record=SimpleNamespace(shards=shards_of(number), elsewhere={})
        )

    parts = Complete(Mark(1, 1), (rank(0), rank(1)))
    files = [
        TensorFile({"a": stored(1.0)}, {"b": "a"}),
        TensorFile({"a": stored(2.0), "b": stored(2.0)}, {}),
    ]
    monkeypatch.setattr(resharding, "tensors_of", lambda part, _name: files[part.number])
    monkeypatch.setattr(resharding, "whole_file", lambda part, _name, _ranks: files[part.number])
    for first in (0, 1):
        found = resharding._file(parts, first, "model.safetensors", shards_of(first), resharding.whole)
        for path in "ab":
            assert found.tensors[found.aliases.get(path, path)].view().tolist() == [1.0, 2.0]
    files[0] = TensorFile({"a": stored(1.0)}, {})
    with pytest.raises(CorruptStoreError, match=r"rank-0/model.safetensors: lacks b"):
        resharding._file(parts, 1, "model.safetensors", shards_of(1), resharding.whole)
