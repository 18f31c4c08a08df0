"""Ranks that have parameters of other names: an export has all of them, and says what of them it cannot have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_to_reshard
import torch
from job_of_ranks import Job

import checkflow
from checkflow.cli import run
from checkflow.distributed.joining import joined_record
from checkflow.distributed.marks import Mark
from checkflow.distributed.parts import Complete
from checkflow.distributed.resharding import consolidated, owners_of
from checkflow.errors import InputError
from checkflow.state.host.encode import tensor_parts
from checkflow.state.host.json_values import dump
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.record import (
    CohortRecord,
    GroupRecord,
    ModelRecord,
    OptimizerRecord,
    Record,
    ShardRecord,
    parse_record,
)
from checkflow.state.names import StateName
from checkflow.state.restore import restore

RANK = Path(rank_to_reshard.__file__)


def test_an_export_has_all_stages_and_is_restored_as_one_model(tmp_path: Path) -> None:
    """Their optimizers' steps, which no file has, among them; and torch's planner finds all in the store."""
    store = tmp_path / "store"
    with Job(2, "stages", store, 3, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
        assert [said[-1] for said in job.said.values()] == ["loaded 0 True"] * 2
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "whole.pt")]) == 0
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = rank_to_reshard.net()
    assert state["model"].keys() == model.state_dict().keys()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = checkflow.Training(model, optimizer, lambda: None)
    loaded = consolidated(store).loaded
    restore(loaded.files, loaded.record, training, HostObjects())
    assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())
    assert [float(optimizer.state[parameter]["step"]) for parameter in model.parameters()] == [3.0] * 8
    average = optimizer.state[dict(model.named_parameters())["3.weight"]]["exp_avg"]
    assert torch.equal(average, state["optimizer"]["3.weight.exp_avg"])
    assert parse_record(loaded.record).frozen == ()


def group(*parameters: str, stored: tuple[str, ...] = (), lr: float = 0.1) -> GroupRecord:
    return GroupRecord(parameters=parameters, stored=stored, values={"lr": lr})


def record(
    *groups: GroupRecord, kind: str = "Adam", steps: tuple[float, ...] = (), frozen: tuple[str, ...] = ()
) -> Record:
    parameters = tuple(name for each in groups for name in each.parameters)
    cohort = CohortRecord(
        parameters=parameters,
        slots=("step", "seen"),
        stored=(),
        apart=(),
        host={"step": tensor_parts(torch.tensor(steps))},
        values={"seen": tuple(steps)},
    )
    optimizer = OptimizerRecord(
        name="optimizer", type=kind, file="optimizer.safetensors", groups=groups, cohorts=(cohort,)
    )
    model = ModelRecord(name="model", file="model.safetensors", extra={parameters[-1]: 1})
    return Record.model_construct(
        models=(model,), optimizers=(optimizer,), frozen=frozen, gradients=frozen, shards={}, elsewhere={}
    )


KNOWN = [StateName("model/a"), StateName("model/b")]


def test_of_names_that_both_have_the_first_rank_s_count() -> None:
    ours = record(group("model/a", "model/b"), steps=(1.0, 2.0), frozen=("model/b",))
    theirs = record(group("model/b", "model/c"), group("model/d", lr=0.5), steps=(7.0, 8.0, 9.0), frozen=("model/d",))
    ours = ours.model_copy(update={"modes": {"model": True, "model/b": False}})
    theirs = theirs.model_copy(update={"modes": {"model": True, "model/c": False}})
    found = joined_record(ours, theirs, KNOWN, 1)
    assert found.modes == {"model": True, "model/b": False, "model/c": False}
    (optimizer,), (model,) = found.optimizers, found.models
    assert optimizer.groups == (group("model/a", "model/b", "model/c"), group("model/d", lr=0.5))
    first, second = optimizer.cohorts
    assert first == ours.optimizers[0].cohorts[0]
    assert second.parameters == ("model/c", "model/d") and second.values == {"seen": (8.0, 9.0)}
    assert dump(second.host["step"]) == dump(tensor_parts(torch.tensor([8.0, 9.0])))
    assert found.frozen == found.gradients == ("model/b", "model/d") and model.extra == {"model/b": 1, "model/d": 1}


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        (record(group("model/c"), kind="SGD", steps=(1.0,)), "updated by a SGD, where rank 0 has a Adam"),
        (record(group("model/c", stored=("lr",)), steps=(1.0,)), "in a group whose 'lr' is a tensor"),
    ],
)
def test_what_one_record_cannot_say_is_refused_by_name(theirs: Record, line: str) -> None:
    ours = record(group("model/a", "model/b"), steps=(1.0, 2.0))
    with pytest.raises(InputError, match=f"^model/c: only rank 1 has it, {line}, which one optimizer cannot say"):
        joined_record(ours, theirs, KNOWN, 1)


def test_a_rank_of_another_stage_has_no_part_of_what_two_share() -> None:
    name = StateName("model/weight")

    def rank(first: int | None) -> Any:
        shard = ShardRecord(shape=(8, 2), offsets=(first or 0, 0), sizes=(4, 2))
        return SimpleNamespace(record=SimpleNamespace(shards={} if first is None else {name: shard}, elsewhere={}))

    parts = Complete(Mark(1, 1), (rank(None), rank(0), rank(4), rank(None)))
    owners = owners_of(parts, 1, name, (8, 2))
    assert {place.offsets: owner for place, owner in owners.items()} == {(0, 0): 1, (4, 0): 2}
