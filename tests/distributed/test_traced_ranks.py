"""Trainings of several ranks, traced in the place of one: what is moved, what lives when, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rank_on_schedule import training
from rank_to_kill import ZeroRedundancyOptimizer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkflow
from checkflow import Training, hardware
from checkflow.choice import Surroundings, choose
from checkflow.compiler import Options
from checkflow.errors import InfeasibleError, InputError, ModelFileError, TraceError
from checkflow.graph import CollectiveKind, Graph, Role
from checkflow.graphfile import read_graph, write_graph
from checkflow.trace import Traced, World, in_place_of, trace_training

KIND = CollectiveKind
WIDTH = 8


def traced(factory: Callable[[], Training], size: int, rank: int = 0) -> Traced:
    with in_place_of(World(size, rank)):
        found = trace_training(factory, model="m", world=World(size, rank))
    assert not found.real  # all of it on fake tensors
    assert not found.graph.unlisted
    assert not torch.distributed.is_initialized()
    return found


def moved(graph: Graph) -> list[tuple[CollectiveKind, int, int, int]]:
    found = [op.collective for op in graph.ops if op.collective is not None]
    return [(each.kind, each.size_bytes, each.ranks, each.stride) for each in found]


def layers(
    wrap: Callable[[nn.Sequential], nn.Module],
    width: int = WIDTH,
    update: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Training:
    """Two linear layers without biases, of 4 * width * width bytes each."""
    model = wrap(nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)))
    optimizer = update(model.parameters(), foreach=True)
    x = torch.randn(3, width)

    def iteration() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, iteration)


def sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def replicated(model: nn.Sequential) -> nn.Module:
    """Two replicas of a sharded model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


# What is moved


def test_fsdp_gathers_each_layer_twice_and_scatters_its_gradients() -> None:
    """The last layer, too: only the root's own parameters would stay gathered after the forward pass."""
    graph = traced(partial(layers, sharded), 4).graph
    gather, scatter = (KIND.ALL_GATHER, 256, 4, 1), (KIND.REDUCE_SCATTER, 256, 4, 1)
    assert moved(graph) == [gather, gather, gather, gather, scatter, scatter]
    assert graph.world_size == 4


def test_hsdp_also_sums_what_shards_have_over_the_replicas() -> None:
    """A rank's neighbours hold the other shards; those of its own shard are as many ranks apart."""

    def wrap(model: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh)
        return model

    assert moved(traced(partial(layers, wrap), 8, rank=5).graph) == [
        (KIND.ALL_GATHER, 512, 4, 1),
        (KIND.REDUCE_SCATTER, 512, 4, 1),
        (KIND.ALL_REDUCE, 128, 2, 4),
    ]


def test_ddp_sums_buckets_as_they_are_ready() -> None:
    """Two buckets: the sum of the one is under way while the other's gradient is made. Buckets are gradients."""
    graph = traced(partial(layers, partial(DistributedDataParallel, bucket_cap_mb=2e-4)), 2).graph
    assert moved(graph) == [(KIND.ALL_REDUCE, 256, 2, 1)] * 2
    names = [op.name for op in graph.ops]
    first = names.index("c10d.allreduce_.default")
    assert "aten.mm.default" in names[first:]
    sums = [op for op in graph.ops if op.collective is not None]
    assert {graph.tensors[i].role for op in sums for i in op.writes} == {Role.GRADIENT}


def test_ddp_hands_the_first_ranks_buffers_on() -> None:
    assert moved(traced(partial(training, "synced"), 2).graph)[:2] == [(KIND.ROOTED, 256, 2, 1), (KIND.ROOTED, 8, 2, 1)]


def test_tensor_parallel_sums_activations() -> None:
    """Who waits for the result is who uses it: to wait is no operator."""
    graph = traced(partial(training, "tp"), 2).graph
    assert {found[:3:2] for found in moved(graph)} == {(KIND.ALL_REDUCE, 2)}
    assert not [op for op in graph.ops if "wait" in op.name]


def test_a_mesh_of_both_has_both_groups() -> None:
    """Neighbours compute one layer, every other rank has a shard of it."""
    groups = {found[2:] for found in moved(traced(partial(training, "both"), 4, rank=3).graph)}
    assert groups == {(2, 1), (2, 2)}


@pytest.mark.parametrize("kind", ["synced", "fsdp", "tp", "both"])
def test_real_tensors_move_as_much(kind: str) -> None:
    """Where data decide what runs, a rank is traced on its own tensors. Collectives leave there what was there."""
    world = World(4)
    with in_place_of(world):
        real = trace_training(partial(training, kind), model="m", real=True, world=world)
    assert real.real
    assert moved(real.graph) == moved(traced(partial(training, kind), 4).graph)


# What lives when


def test_unsharded_parameters_come_and_go() -> None:
    """A layer's is there from its allocation to its forward's end, and again for its backward; state is the shard."""
    graph = traced(partial(layers, sharded), 4).graph
    whole = [t for t in graph.tensors if t.size_bytes == 256 and t.name.startswith("%resize_")]
    assert len(whole) == 4
    names = [op.name for op in graph.ops]
    forward = [step for step, name in enumerate(names, 1) if name == "aten.mm.default"][:2]
    assert [t.freed for t in whole[:2]] == forward
    assert all(names[t.born - 1] == "storage.resize_" for t in whole)
    assert all(later.born > earlier.freed for earlier, later in pairwise(whole))
    assert whole[2].freed == [step for step, name in enumerate(names, 1) if name == "aten.mm.default"][3]
    assert whole[3].freed < names.index("aten._foreach_mul_.Scalar")
    state = [t for t in graph.tensors if t.role.is_state]
    assert {(t.size_bytes, t.views[0].shape) for t in state} == {(64, (2, WIDTH))}
    assert len(state) == 6


def test_collectives_write_what_torch_does_not_declare() -> None:
    """The gathered buffer is what the layer's parameter is copied from; a gradient's shard is written by its sum."""
    graph = traced(partial(layers, sharded), 4).graph
    for op in graph.ops:
        if op.collective is not None:
            assert op.writes
    gradients = [i for i, tensor in enumerate(graph.tensors) if tensor.role is Role.GRADIENT]
    assert [graph.ops[graph.writes[i][-1] - 1].name for i in gradients] == ["c10d._reduce_scatter_base_.default"] * 2


def test_a_rank_without_an_element_of_a_tensor_has_its_state_all_the_same(tmp_path: Path) -> None:
    """One row on four ranks: three have a part of no element, whose moments have no byte; the file says so."""
    graph = traced(partial(training, "fsdp"), 4, rank=3).graph
    empty = {t.name: t.size_bytes for t in graph.tensors if t.role.is_state and not t.size_bytes}
    assert empty == dict.fromkeys(
        (f"optimizer/4.{name}.{entry}" for name in ("weight", "bias") for entry in ("exp_avg", "exp_avg_sq")), 0
    )
    assert not {graph.tensors[i].name for i in graph.written_state} & empty.keys()
    path = tmp_path / "g.json"
    write_graph(path, graph)
    assert read_graph(path) == graph


# Ranks that are alike


@pytest.mark.parametrize("rank", [1, 3])
def test_ranks_with_even_shards_have_one_graph(rank: int) -> None:
    first, other = (traced(partial(layers, sharded), 4, each) for each in (0, rank))
    assert first.graph == other.graph
    assert "each of the 4 ranks holds as much: one schedule does for all that run the same code" in first.notes


def test_ranks_with_uneven_shards_do_not() -> None:
    """Ten rows on four ranks are 3, 3, 3 and 1."""
    first, last = (traced(partial(layers, sharded, 10), 4, each) for each in (0, 3))
    assert first.graph != last.graph
    assert any("0.weight and 5 more: other ranks may hold less or more of it than rank 3" in n for n in last.notes)


def test_ranks_that_keep_the_state_of_other_parameters_do_not() -> None:
    """Of two layers each has that of one, and receives the other."""
    update = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    factory = partial(layers, DistributedDataParallel, update=update)
    found = [traced(factory, 2, each) for each in (0, 1)]
    for rank, each in enumerate(found):
        assert "optimizer: each of the 2 ranks keeps state of other parameters; compile each --rank" in each.notes
        assert moved(each.graph)[-2:] == [(KIND.ROOTED, 256, 2, 1)] * 2
        last = {tensor for op in each.graph.ops[-2:] for tensor in op.writes}
        state = {view.name: number for number, row in enumerate(each.graph.tensors) for view in row.views}
        assert {state["model/0.weight"], state["model/1.weight"]} == last
        assert {name for name in state if name.endswith("exp_avg")} == {f"optimizer/{rank}.weight.exp_avg"}


def test_trainings_are_traced_one_after_the_other() -> None:
    """Nothing remembers the groups of the one before."""
    for rank in range(4):
        traced(partial(training, "both"), 4, rank)


# What a model file finds, and what is refused


def test_the_environment_is_torchruns_and_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "mine")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with in_place_of(World(8, 5)):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("5", "8", "0")
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (5, 8)
        with pytest.raises(ModelFileError, match=r"ranks.py:\d+: calls init_process_group, which --world"):
            torch.distributed.init_process_group("gloo")
        with pytest.raises(InputError, match="this process is a rank already"), in_place_of(World(2)):
            pass
        torch.distributed.destroy_process_group()  # code may clean up
    assert os.environ["RANK"] == "mine" and "WORLD_SIZE" not in os.environ
    with in_place_of(None):
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("size", "rank", "message"),
    [
        (0, 0, "--world-size 0: is no number of ranks; give one from 1 to 1048576"),
        (4, 4, "--rank 4: is none of the 4 ranks; give one from 0 to 3"),
        (4, -1, "--rank -1: is none of the 4 ranks; give one from 0 to 3"),
    ],
)
def test_a_rank_that_there_is_not(size: int, rank: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        World(size, rank)


def test_of_one_process_ranks_are_refused() -> None:
    """And told how: those that ask for a group, and those that bring one."""
    with pytest.raises(ModelFileError, match=r"asks for torch.distributed's processes; give"):
        trace_training(partial(layers, sharded), model="m")
    with (
        in_place_of(World(2)),
        pytest.raises(TraceError, match="m: DTensor belongs to several processes; give"),
    ):
        trace_training(partial(layers, sharded), model="m")
    with pytest.raises(InputError, match="world_size: a Training that is there is one process's"):
        checkflow.compile(layers(lambda model: model), world_size=2, device="h100")
    with pytest.raises(InputError, match="device='measure': of ranks only one is here"):
        checkflow.compile(partial(layers, sharded), world_size=2, device="measure")
    with pytest.raises(InputError, match="rtx3090: this profile has no network"):
        checkflow.compile(partial(layers, sharded), world_size=2)


@pytest.mark.parametrize(("wrap", "size"), [(DistributedDataParallel, 2), (replicated, 4)])
def test_each_rank_plans_for_its_share_of_what_ranks_have_alike(
    wrap: Callable[[nn.Sequential], nn.Module], size: int
) -> None:
    """Without anything that is each rank's own: of replicas a rank divides with its like alone."""
    found: dict[tuple[str, int], int] = {}
    for rank in range(size):
        schedule = checkflow.compile(partial(layers, wrap), world_size=size, rank=rank, divided=True, device="h100")
        for row in schedule.state:
            for view in row.views:
                found[view.name, rank] = row.bytes
    assert sum(found.values()) == 3 * 2 * 4 * WIDTH**2, "each byte once"


def test_where_gradients_go_along_what_an_optimizer_keeps_stays_with_its_parameter() -> None:
    """Whose update makes both anew."""
    found: list[str] = []
    for rank in range(2):
        schedule = checkflow.compile(
            partial(layers, DistributedDataParallel), world_size=2, rank=rank, divided=True, device="h100",
            policy="lowdiff", bandwidth="2GB/s",
        )  # fmt: skip
        names = {view.name for row in schedule.state for view in row.views}
        parameters = {name for name in names if name.startswith("model/")}
        assert schedule.lanes > 1 and {row.parameter.name for row in schedule.gradients} == parameters
        entries = (name.removeprefix("optimizer/").rpartition(".")[0] for name in names - parameters)
        assert {f"model/{stem}" for stem in entries} == parameters
        found += names
    assert len(found) == len(set(found)) == 3 * 2


@pytest.mark.parametrize("divided", [False, True])
def test_what_is_for_one_process_is_refused_for_several(divided: bool) -> None:
    """Before anything is traced, and of a graph; and no choice takes it. One rank by itself is one process."""
    called: list[int] = []

    def factory() -> Training:
        called.append(1)
        return layers(DistributedDataParallel)

    refused = pytest.raises(InputError, match="policy='lowdiff_plus': is for one process, and these are 2 ranks; use ")
    with refused:
        checkflow.compile(factory, world_size=2, divided=divided, device="h100", policy="lowdiff_plus")
    assert not called
    world = World(2, divided=divided)
    with in_place_of(world):
        graph = trace_training(factory, model="m", world=world).graph
    graph = hardware.retime(graph, hardware.load_profile("h100"))
    with refused:
        checkflow.compile(graph, policy="lowdiff_plus")
    assert checkflow.compile(factory, world_size=1, device="h100", policy="lowdiff_plus").replica


def test_no_choice_for_ranks_takes_what_is_for_one_process() -> None:
    graph = traced(partial(layers, DistributedDataParallel), 2).graph
    graph = hardware.retime(graph, hardware.load_profile("h100"))
    amid = Surroundings(10**9, approximate=True)
    found = choose(graph, Options(10**9, interval=None), amid, host_ns=lambda _: 0)
    assert dict(found.refused)["lowdiff_plus"] == "it is for one process, and these are 2 ranks"
    alone = choose(replace(graph, world_size=1), Options(10**9, interval=None), amid, host_ns=lambda _: 0)
    assert "lowdiff_plus" in {option.policy for option in alone.options}


def uneven() -> Training:
    """Of two ranks one has the large parameter, and the other both small ones: the link carries that share alone."""
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 2, bias=False), nn.Linear(2, 1, bias=False))
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def iteration() -> None:
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, iteration)


@pytest.mark.parametrize(
    ("policy", "bandwidth", "refusing"),
    [("checkflow", "28MB/s", 1), ("lowdiff", "14MB/s", 1), ("checkfreq", "14MB/s", 0)],
)
def test_the_interval_of_a_share_is_given_and_not_chosen(
    policy: str, bandwidth: str, refusing: int, tmp_path: Path
) -> None:
    """1, unless another is: each share alone would have its own, and ranks have to have one in common."""
    refused: list[str] = []
    for rank in range(2):
        world = World(2, rank, divided=True, entries_stay=policy == "lowdiff")
        with in_place_of(world):
            graph = trace_training(uneven, model="m", world=world).graph
        graph = hardware.retime(graph, hardware.load_profile("h100"))
        write_graph(tmp_path / "g.json", graph)
        assert read_graph(tmp_path / "g.json") == graph and graph.divided
        asked = {"policy": policy, "bandwidth": bandwidth}
        for model, ranks in ((graph, {}), (uneven, {"world_size": 2, "rank": rank, "divided": True, "device": "h100"})):
            assert checkflow.compile(model, interval=9, **asked, **ranks).interval == 9  # type: ignore[arg-type]
            try:
                assert checkflow.compile(model, **asked, **ranks).interval == 1  # type: ignore[arg-type]
            except InfeasibleError as error:
                refused.append(str(error))
    assert len(refused) == 2 * refusing, "the model of one rank, and its graph"
    for line in refused:
        assert re.search(r"or interval=\d.*; give all ranks the same interval and policy$", line)


def test_no_rank_chooses_a_policy_for_its_share() -> None:
    """Nor by a graph of it."""
    world = World(2, divided=True)
    with in_place_of(world):
        graph = trace_training(uneven, model="m", world=world).graph
    graph = hardware.retime(graph, hardware.load_profile("h100"))
    with pytest.raises(InputError, match="divided=True: is not for policy='auto'"):
        checkflow.compile(graph, bandwidth="1GB/s", policy="auto", mtbf="3h")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": None}, "divided=True: among how many ranks is not said; give world_size, too"),
        (
            {"policy": "auto", "mtbf": "3h"},
            "divided=True: is not for policy='auto', for each rank might choose another",
        ),
        ({}, "divided=True: its ranks have nothing alike that is known to stay so, or not a parameter for each"),
    ],
)
def test_what_ranks_cannot_divide(given: dict[str, object], message: str) -> None:
    asked: dict[str, object] = {"world_size": 2, "divided": True, "device": "h100"} | given
    with pytest.raises(InputError, match=message):
        checkflow.compile(partial(layers, sharded), **asked)  # type: ignore[arg-type]


def test_parameters_of_one_storage_are_no_share_for_each() -> None:
    def flat(model: nn.Sequential) -> nn.Module:
        parameters = list(model.parameters())
        whole = torch.zeros(sum(parameter.numel() for parameter in parameters))
        for parameter, piece in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):  # type: ignore[no-untyped-call]
            parameter.data = piece.view_as(parameter)
        return DistributedDataParallel(model)

    with pytest.raises(TraceError, match="divided=True: there is less than a share for each rank; leave it out"):
        checkflow.compile(partial(layers, flat), world_size=2, divided=True, device="h100")


def test_communication_hooks_are_refused() -> None:
    def wrap(model: nn.Sequential) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped

    with in_place_of(World(2)), pytest.raises(ModelFileError, match=r"ranks.py:\d+: DistributedDataParallel's comm"):
        trace_training(partial(layers, wrap), model="m", world=World(2))


def test_a_mesh_that_does_not_fit_is_one_line() -> None:
    def wrap(model: nn.Sequential) -> nn.Module:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 4)))
        return model

    with (
        in_place_of(World(6)),
        pytest.raises(ModelFileError, match="Mesh should not be bigger"),
    ):
        trace_training(partial(layers, wrap), model="m", world=World(6))
