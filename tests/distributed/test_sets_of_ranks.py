"""Sets of ranks that train by themselves: other ranks restore one whole model of one set, and what is left is told."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import warnings
from pathlib import Path

import pytest
import rank_in_sets
import torch
from job_of_ranks import Job
from torch.distributed.checkpoint.state_dict_loader import load

import checkflow
from checkflow.distributed.parts import Complete, RankPart, all_in
from checkflow.distributed.resharding import of_all
from checkflow.errors import InputError

RANK = Path(rank_in_sets.__file__)
LEFT = (
    "no rank restores rank {rank}'s own model/0.weight, model/0.bias and 2 others, nor what one more rank had: as many "
    "ranks as saved iteration 2 would (4)"
)


def run(size: int, ranks: str, store: Path, iterations: int = 2) -> tuple[dict[int, list[str]], list[str], list[str]]:
    """By rank what it restored and what it had at the end; whose generator each has; and the lines that are told."""
    with Job(size, ranks, store, iterations, script=RANK) as job:
        assert set(job.wait().values()) == {0}, job.errors
        said = {rank: [line.split(" ", 3) for line in lines] for rank, lines in job.said.items()}
        told = [line for lines in job.said.values() for line in lines if line.startswith("told")]
    models = {
        rank: [words[2 if words[0] == "restored" else 1] for words in lines if words[0] in ("restored", "done")]
        for rank, lines in said.items()
    }
    generators = [words[3] for lines in said.values() for words in lines if words[0] == "restored"]
    return models, generators, [line.removeprefix(f"told {store}: ") for line in told]


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def older(parts: Complete) -> Complete:
    """As records were that did not say who shares what."""

    def before(part: RankPart) -> RankPart:
        shards = {name: shard.model_copy(update={"lowest": None}) for name, shard in part.record.shards.items()}
        return RankPart(part.checkpoint, part.record.model_copy(update={"shards": shards}))

    return dataclasses.replace(parts, ranks=tuple(map(before, parts.ranks)))


def weights(parts: Complete) -> str:
    tensors = of_all(parts).files["model.safetensors"].tensors
    return digest([tensors[name].view() for name in sorted(tensors)])


def test_parts_of_two_sets_are_never_put_together(tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    models, _, told = run(4, "03.12", store)
    a, b = models[0][-1], models[1][-1]
    assert a != b and [models[rank][-1] for rank in range(4)] == [a, b, b, a] and not told
    for size, ranks, expected, line in (
        (2, "01", [a, a], LEFT.format(rank=1)),  # one model of all ranks
        (2, "ddp", [a, a], LEFT.format(rank=1)),
        (2, "own", [a, b], None),
        (4, "03.12", [a, b, b, a], None),
        (4, "01.23", [a, a, b, b], None),  # as many ranks, numbered otherwise
    ):
        shutil.copytree(store, copy)
        models, generators, told = run(size, ranks, copy)
        assert [models[rank][0] for rank in range(size)] == expected, ranks
        assert told == ([] if line is None else [line]), ranks
        assert len(set(generators)) == size, "each rank goes on with its own"
        shutil.rmtree(copy)


def test_what_is_exported_or_loaded_is_of_one_set(tmp_path: Path) -> None:
    run(4, "03.12", tmp_path)
    parts = all_in(tmp_path)[0]
    of_a = Complete(parts.mark, (parts.ranks[0], parts.ranks[3]))
    of_b = Complete(parts.mark, (parts.ranks[1], parts.ranks[2]))
    assert weights(parts) == weights(of_a) != weights(of_b)
    state = {"model": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)).state_dict()}
    with warnings.catch_warnings(action="ignore"):  # that one process alone is no group
        load(state, storage_reader=checkflow.StoreReader(tmp_path))
    assert digest([state["model"][name] for name in sorted(state["model"])]) == weights(of_a)
    # an older checkpoint does not say which parts belong together: its copies do, where they are alike
    with pytest.raises(
        InputError,
        match=r"^model/0\.weight: ranks 0 and 1 have saved other bytes of the same part of it, and nothing says which "
        r"ranks' parts belong together; resume with 4 ranks, divided as they were$",
    ):
        of_all(older(parts))
    assert weights(older(Complete(parts.mark, of_a.ranks + of_a.ranks))) == weights(of_a)


def test_what_each_rank_had_whole_is_of_one_where_ranks_share_it_now(tmp_path: Path) -> None:
    models, _, _ = run(4, "own", tmp_path)
    first = models[0][-1]
    assert len({each[-1] for each in models.values()}) == 4
    models, generators, told = run(2, "01", tmp_path)
    assert [models[rank][0] for rank in range(2)] == [first, first]
    assert len(set(generators)) == 2
    (line,) = told
    assert line.startswith("no rank restores rank 1's own model/0.weight") and "nor what 2 more ranks had" in line


def test_what_the_first_rank_lists_alone_is_left_out_by_more_ranks(tmp_path: Path) -> None:
    models, _, _ = run(2, "ddp", tmp_path)
    more, _, told = run(4, "ddp", tmp_path)
    assert {each[0] for each in more.values()} == {models[0][-1]}
    assert told == ["rank 2 leaves out extra.best, which rank 0 of iteration 2 listed and it does not"]
