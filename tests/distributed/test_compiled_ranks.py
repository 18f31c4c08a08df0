"""What is compiled in the place of a rank is what it runs: the schedule is attached there, the memory is eager's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import rank_on_schedule
import rank_to_watch
import torch
from job_of_ranks import Job
from rank_to_kill import net
from rank_to_watch import SCALAR_BYTES
from torch.nn.parallel import DistributedDataParallel

import checkflow
from checkflow.cli import run
from checkflow.graph import Graph, Role
from checkflow.plan.rebuilt import is_written_again, rebuilt_in
from checkflow.schedule import Schedule, read_schedule
from checkflow.trace import World, in_place_of, trace_training

ITERATIONS = 7
RUNS = Path(rank_on_schedule.__file__)
WATCHED = Path(rank_to_watch.__file__)


def compiled(kind: str, size: int, bandwidth: str, folder: Path, *, divided: bool = False) -> list[Schedule]:
    """By each rank, into schedule-RANK.json."""
    return [
        checkflow.compile(
            rank_on_schedule.training,
            arguments={"kind": kind},
            world_size=size,
            rank=rank,
            divided=divided,
            device="h100",
            bandwidth=bandwidth,
            output=folder / f"schedule-{rank}.json",
        )
        for rank in range(size)
    ]


# Even shards that leave in part as snapshots, for the link is slow; uneven ones, of which a rank may have none.
@pytest.mark.parametrize(
    ("kind", "bandwidth", "alike"),
    [
        ("llama", "50MB/s", True),
        ("fsdp", "100MB/s", False),
        ("tp", "100MB/s", True),
        ("synced", "100MB/s", True),
        ("zero", "100MB/s", False),
        ("zero_views", "100MB/s", False),
    ],
)
def test_each_rank_runs_what_was_compiled_for_it(kind: str, bandwidth: str, alike: bool, tmp_path: Path) -> None:
    """Every anchor fires and nothing is unwatched; what is restored has the bytes of the end."""
    schedules = compiled(kind, 2, bandwidth, tmp_path)
    assert (schedules[0].digest == schedules[1].digest) == alike
    assert any(action.snapshot for action in schedules[0].actions) == (kind == "llama")
    runs(kind, 2, schedules, tmp_path)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`:FutureWarning")
@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("views", 2), ("hsdp", 4)])
def test_ranks_save_a_share_each_of_what_they_have_alike(kind: str, size: int, tmp_path: Path) -> None:
    """Of DistributedDataParallel all, of replicas of a sharded model the same part: all of it is some rank's."""
    whole, *_ = compiled(kind, size, "100MB/s", tmp_path)
    schedules = compiled(kind, size, "100MB/s", tmp_path, divided=True)
    assert not whole.unlisted, "DistributedDataParallel's own"
    own_bytes = size * sum(row.bytes for row in whole.state if ".running_" in row.views[0].name)
    assert sum(schedule.state_bytes for schedule in schedules) < 1.2 * size * whole.state_bytes / 2 + own_bytes
    names = {view.name for schedule in schedules for row in schedule.state for view in row.views}
    assert {view.name for row in whole.state for view in row.views} <= names
    runs(kind, size, schedules, tmp_path)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`:FutureWarning")
def test_a_schedule_of_another_share_is_refused(tmp_path: Path) -> None:
    """Of another rank, or of ranks that cannot read each other's."""
    compiled("ddp", 2, "100MB/s", tmp_path, divided=True)
    for store, schedule in (("store", "schedule-0.json"), ("disk-{rank}", "schedule-%.json")):
        with Job(2, "ddp", tmp_path / store, tmp_path / schedule, 3, script=RUNS) as job:
            assert 1 in set(job.wait().values())
        assert any("schedule: has no row for model/" in line for lines in job.errors.values() for line in lines)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`:FutureWarning")
def test_gradients_of_parameters_whose_state_another_rank_saves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a graph that was traced before anybody asked for gradients: its entries go round. Nor is it compiled."""
    for rank in range(2):
        graph, ranks = tmp_path / f"graph-{rank}.json", ("--world-size", "2", "--rank", str(rank), "--divided")
        assert run(["trace", str(RUNS), "--set", "kind=ddp", *ranks, "--device", "h100", "-o", str(graph)]) == 0
        compiled_of = partial(checkflow.compile, graph, bandwidth="12MB/s", policy="lowdiff")
        with pytest.raises(
            checkflow.InputError, match=r"has optimizer/.*, but another rank saves model/.*; compile the"
        ):
            compiled_of()
        with monkeypatch.context() as unchecked:
            unchecked.setattr("checkflow.compiler._check_entries", lambda *_: None)
            compiled_of(output=tmp_path / f"schedule-{rank}.json")
    with Job(2, "ddp", tmp_path / "store", tmp_path / "schedule-%.json", 3, script=RUNS) as job:
        assert set(job.wait().values()) == {1}
    said = (line for lines in job.errors.values() for line in lines)  # who ends first takes the ranks' store with it
    assert any("compile the model with --divided and this policy, or a graph" in line for line in said)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`:FutureWarning")
@pytest.mark.parametrize("policy", ["checkflow", "lowdiff"])
def test_a_schedule_of_a_share_has_a_graph_that_trace_writes(
    policy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By which it verifies, and from which the same schedule comes."""
    graph, schedule, again = (str(tmp_path / f"{name}.json") for name in ("graph", "schedule", "again"))
    model = (str(RUNS), "--set", "kind=ddp", "--world-size", "2", "--rank", "1", "--divided", "--policy", policy)
    link = ("--bandwidth", "12MB/s", "--interval", "1" if policy == "lowdiff" else "9")
    assert run(["trace", *model, "--device", "h100", "-o", graph]) == 0
    assert run(["compile", *model, "--device", "h100", *link, "-o", schedule]) == 0
    assert run(["verify", schedule, graph]) == 0
    assert run(["compile", graph, "--policy", policy, *link, "-o", again]) == 0
    capfd.readouterr()
    if policy == "lowdiff":
        assert run(["trace", *model[:-2], "--device", "h100", "-o", graph]) == 0
        assert run(["verify", schedule, graph]) == 1
        assert "; trace with --divided --policy lowdiff" in capfd.readouterr().err
    assert Path(again).read_bytes() == Path(schedule).read_bytes()
    assert bool(read_schedule(Path(schedule)).gradients) == (policy == "lowdiff")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--policy", "lowdiff"), "--policy lowdiff: is for --divided; leave it out, and give it to compile"),
        (("--policy", "lowdiff_plus", "--divided"), "--policy lowdiff_plus: is for one process, and these are 2 ranks"),
    ],
)
def test_policies_that_are_not_for_a_graph(
    given: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", str(RUNS), "--world-size", "2", *given]) == 2
    assert message in capfd.readouterr().err


def runs(kind: str, size: int, schedules: list[Schedule], tmp_path: Path) -> None:
    ends = []
    for resumed in (0, ITERATIONS):
        last = ITERATIONS - ITERATIONS % schedules[0].interval
        with Job(size, kind, tmp_path / "store", tmp_path / "schedule-%.json", last, script=RUNS) as job:
            found = job.done()
        assert {iteration for iteration, _ in found.values()} == {min(resumed, last)}
        for said in job.said.values():
            assert "unwatched" in said and "silent" in said
            assert ("staged 0" in said) == (resumed > 0)
        lags = [line.split()[1:] for said in job.said.values() for line in said if line.startswith("lags ")]
        assert {int(greatest) for _, greatest in lags} == {max(int(own) for own, _ in lags)}
        ends.append({rank: digest for rank, (_, digest) in found.items()})
    assert ends[0] == ends[1]


def test_another_ranks_schedule_is_refused_where_parts_are_uneven(tmp_path: Path) -> None:
    """By the first tensor of which that rank has more, on each rank."""
    compiled("fsdp", 2, "100MB/s", tmp_path)
    with Job(2, "fsdp", tmp_path / "store", tmp_path / "schedule-0.json", 3, script=RUNS) as job:
        assert set(job.wait().values()) == {1}
    for lines in job.errors.values():
        assert any("model/4.weight: has shape (0, 32), (1, 32) in the schedule; make such" in line for line in lines)


def resident(graph: Graph) -> list[tuple[str, int]]:
    """Of each operator its name, and what lives beside scalars once it has run.

    A gradient may be a piece of a larger storage, and counts however small it is.
    """
    sizes = [0] * (graph.steps + 2)
    for tensor in graph.tensors:
        if tensor.size_bytes > SCALAR_BYTES or tensor.role is Role.GRADIENT:
            for step in range(max(tensor.born, 1), tensor.freed + 1):
                sizes[step] += tensor.size_bytes
    return [(op.name, sizes[step]) for step, op in enumerate(graph.ops, start=1)]


def in_buckets(*, views: bool) -> checkflow.Training:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def iteration() -> None:
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


@pytest.mark.parametrize("stay", [False, True])
def test_gradients_of_buckets_rebuild_state(stay: bool) -> None:
    """Those that lie in them, where the next ones are written, are there until the iteration's end."""
    world = World(2)
    with in_place_of(world):
        graph = trace_training(partial(in_buckets, views=stay), model="m", world=world).graph
    found = rebuilt_in(graph)
    assert len(found) == sum(tensor.role is Role.PARAMETER for tensor in graph.tensors)
    assert {is_written_again(each.gradient, graph) for each in found} == {stay}
    assert not stay or {each.gone for each in found} == {1}


@pytest.mark.parametrize("kind", ["fsdp", "llama"])
def test_memory_is_what_ranks_have_that_run(kind: str) -> None:
    """Operator by operator, over gloo. Gloo's threads hold the last result a little longer, and so may add that.

    The tokens are not known there before they are read.
    """
    world = World(2)
    with in_place_of(world):
        graph = trace_training(partial(rank_on_schedule.training, kind), model="m", world=world).graph
    with Job(2, kind, script=WATCHED) as job:
        assert set(job.wait().values()) == {0}, job.errors
    watched = iter([(word[1], int(word[2])) for word in map(str.split, job.said[0]) if word[0] == "operator"])
    differences = []
    for name, size in resident(graph):
        if name != "storage.resize_":
            differences.append(next(now for found, now in watched if found == name) - size)
    held = max(op.collective.size_bytes for op in graph.ops if op.collective is not None)
    tokens = 17 * 8
    assert all(-tokens <= difference <= held for difference in differences)
    assert differences.count(0) > 0.9 * len(differences)
