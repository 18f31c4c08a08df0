"""A part of what ranks share is one block of the whole, and all parts have each element once; or it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import checkflow
from checkflow.distributed.marks import Mark
from checkflow.distributed.parts import Complete
from checkflow.distributed.resharding import owners_of
from checkflow.errors import FormatError, InputError
from checkflow.state.host.record import ShardRecord
from checkflow.state.live import live_state
from checkflow.state.names import StateName
from checkflow.state.shards import Place, fill, is_block, local, place_of
from checkflow.trace import World, in_place_of

STRIDED = _StridedShard(0, split_factor=2)
WAYS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(1)),
    (STRIDED, Shard(0)),  # as FSDP2 does where tensor parallelism has divided it
    (STRIDED, Replicate()),
    (Replicate(), STRIDED),
    (STRIDED, Shard(1)),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_part_is_a_block_where_it_lies_in_the_whole_at_its_place(way: tuple[Placement, Placement]) -> None:
    is_apart = STRIDED in way and way != (STRIDED, Shard(0))
    for rows in (8, 16) if STRIDED in way else (8, 7, 5, 3, 1):
        whole = torch.arange(rows * 4.0).reshape(rows, 4)
        for rank in range(4):
            with in_place_of(World(4, rank)):
                shared = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), way, src_data_rank=None)
                place = place_of(shared)
                assert place is not None
                there = whole
                for dim, (offset, size) in enumerate(zip(place.offsets, place.sizes, strict=True)):
                    there = there[(slice(None),) * dim + (slice(offset, offset + size),)]
                assert is_block(shared) is torch.equal(there, local(shared)) is not is_apart


def test_a_part_that_is_none_is_refused_by_name() -> None:
    with in_place_of(World(2)):
        model, mesh = torch.nn.Linear(3, 8), init_device_mesh("cpu", (2,))
        weight = distribute_tensor(model.weight.detach(), mesh, [STRIDED], src_data_rank=None)
        model.weight = torch.nn.Parameter(weight)
        training = checkflow.Training(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None)
        with pytest.raises(
            InputError, match=r"^model/weight: this rank's part of it, of shape \(4, 3\), is by its pla"
        ):
            live_state(training)


def test_a_part_of_another_size_than_its_placements_say_is_refused() -> None:
    with in_place_of(World(2)):
        mesh = init_device_mesh("cpu", (2,))
        for rows, is_one in ((4, True), (3, False), (0, True)):
            part = torch.ones(rows, 3)
            shared = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
            )
            assert is_block(shared) is is_one


def places(*parts: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> list[Place]:
    return [Place(shape, offsets, sizes) for offsets, sizes in parts]


@pytest.mark.parametrize(
    ("shape", "parts", "do"),
    [
        ((8, 2), [((0, 0), (4, 2)), ((4, 0), (4, 2))], True),
        ((8, 2), [((4, 0), (4, 2)), ((0, 0), (4, 1)), ((0, 1), (4, 1)), ((8, 0), (0, 2))], True),
        ((8, 2), [((0, 0), (4, 2)), ((2, 0), (4, 2))], False),  # as many elements as there are, some of them twice
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((1, 2), (2, 2))], False),
        ((8, 2), [((0, 0), (4, 2)), ((4, 0), (3, 2))], False),
        ((8, 2), [((0, 0), (4, 2)), ((6, 0), (4, 2))], False),
        ((8, 2), [((0,), (16,))], False),
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((0, 2), [], True),
        ((8, 2), [], False),
    ],
)
def test_parts_fill_a_tensor_where_each_element_is_in_one(
    shape: tuple[int, ...], parts: list[tuple[tuple[int, ...], tuple[int, ...]]], do: bool
) -> None:
    assert fill(shape, places(*parts, shape=shape)) is do


def test_a_checkpoint_whose_parts_overlap_is_refused_though_they_are_as_many_elements() -> None:
    name = StateName("model/weight")

    def rank(first: int) -> Any:
        shards = {name: ShardRecord(shape=(8, 2), offsets=(first, 0), sizes=(4, 2))}
        return SimpleNamespace(record=SimpleNamespace(shards=shards, elsewhere={}))

    assert set(owners_of(Complete(Mark(1, 1), (rank(0), rank(4))), 0, name, (8, 2)).values()) == {0, 1}
    with pytest.raises(FormatError, match=r"^model/weight: its ranks' parts do not fill it, each element once"):
        owners_of(Complete(Mark(1, 1), (rank(0), rank(2))), 0, name, (8, 2))
