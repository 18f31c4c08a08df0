"""Who saves what an optimizer keeps stays so where a training lays it out anew: no rank's bytes stay behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from job_of_ranks import Job
from rank_to_kill import flat
from test_ranks_in_parts import NIGHTLY, NO_END, PAUSE_S, POLICIES

from checkflow.division import Division
from checkflow.errors import InputError
from checkflow.learning.provisional import provisional
from checkflow.runtime.binding import Binding
from checkflow.runtime.matching import bind
from checkflow.state.divided import elsewhere, saved_here, shared_out, vouched
from checkflow.state.live import live_state
from checkflow.training import Training

WAYS = {
    "in mid-run": ["laid=3"],
    "from the start": ["laid=1"],
    "turned": ["laid=3", "how=turned"],
    "rolling in mid-run": ["policy=rolling", "laid=3"],
    "rolling from the start": ["policy=rolling", "laid=1"],
    "rolling turned": ["policy=rolling", "laid=3", "how=turned"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_laid_its_state_out_anew_is_restored(way: str, tmp_path: Path) -> None:
    """Closed and started again, it has the bits that it ended with."""
    ends = []
    for _ in range(2):
        with Job(2, "even", tmp_path, 7, 0, *WAYS[way]) as job:
            ends.append(job.done())
    assert {resumed for resumed, _ in ends[1].values()} == {7}
    assert [digest for _, digest in ends[0].values()] == [digest for _, digest in ends[1].values()]


WHOLE = ["link=4"]
KILLED = [("1", WHOLE), *(("learned", options) for options in (WHOLE, *POLICIES.values()))]  # one tensor is no parts


@pytest.mark.parametrize(("laid", "policy"), KILLED if NIGHTLY else [*KILLED[:2], ("learned", POLICIES["rolling"])])
def test_a_job_killed_under_what_it_learned_is_restored(laid: str, policy: list[str], tmp_path: Path) -> None:
    """Of state that was laid out anew before it learned, or while it follows that."""
    options = [*policy, "when_full=wait"]
    with Job(2, "even", tmp_path / "store", NO_END, PAUSE_S, *options, f"laid={laid}") as job:
        job.learned()
        while not all(job.numbers(rank, "laid") for rank in job.ranks):
            job.reach(min(map(job.iteration, job.ranks)) + 1)
        job.reach(max(map(job.iteration, job.ranks)) + 12)
        begun, promised = job.end("all", 0)
        laid_at = max(max(job.numbers(rank, "laid")) for rank in job.ranks)
    with Job(2, "even", tmp_path / "store", begun + 1, 0, *options) as job:
        ended = job.done()
    assert all(laid_at < promised <= resumed <= begun for resumed, _ in ended.values())
    with Job(2, "even", tmp_path / "uninterrupted", begun + 1, 0) as job:
        assert [digest for _, digest in ended.values()] == [digest for _, digest in job.done().values()]


def shares(*, entries_stay: bool = False) -> tuple[torch.optim.Optimizer, list[Training]]:
    """A training after an update, as each of two ranks saves it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    alone = Training(model, optimizer, lambda: None)
    sizes = {f"model/{name}": parameter.numel() * 4 for name, parameter in model.named_parameters()}
    return optimizer, [shared_out(alone, rank, [((0, 1), sizes)], entries_stay=entries_stay) for rank in range(2)]


def others(training: Training) -> dict[str, int]:
    return {str(name): rank for name, rank in elsewhere(training, live_state(training)).items()}


@pytest.mark.parametrize("entries_stay", [False, True])
def test_who_saves_an_entry_is_no_matter_of_memory(entries_stay: bool) -> None:
    """And each rank reads its own out of what lies together."""
    optimizer, ranks = shares(entries_stay=entries_stay)
    schedules = [provisional(training, "checkflow", 1) for training in ranks]
    bound = [bind(schedule, training) for schedule, training in zip(schedules, ranks, strict=True)]
    before = list(map(others, ranks))
    flat(optimizer)
    assert list(map(others, ranks)) == before and all(before)
    now = [bind(schedule, training, fixed) for schedule, training, fixed in zip(schedules, ranks, bound, strict=True)]
    for training, binding in zip(ranks, now, strict=True):
        assert names_in(binding) == {live.name for live in saved_here(training) if not live.is_host_scalar}
        assert binding.loose


def names_in(binding: Binding) -> set[str]:
    """What each checkpoint reads."""
    read = {segment.target for storage in binding.storages.values() for segment in storage.segments}
    return read | {live.name for live in binding.loose}


def test_what_slots_have_room_for_is_never_left_to_another_rank() -> None:
    _, (first, second) = shares()
    schedule = provisional(first, "checkflow", 1)
    with pytest.raises(InputError, match=r"^model/\S+: in the schedule of this rank, but rank 0 saves it; "):
        bind(schedule, second)
    with pytest.raises(InputError, match=r"^model/\S+: in the schedule of this rank, but rank 0 saves it; "):
        bind(schedule, second, bind(schedule, first))


def test_ranks_vouch_for_who_saves_what() -> None:
    _, (first, second) = shares()

    def sum_of(*ranks: Training) -> int:
        return sum(vouched(training, live_state(training), content=False) for training in ranks)

    assert first.division is not None
    assert sum_of(first, second) == 0
    turned = {name: savers[::-1] for name, savers in first.division.savers.items()}
    assert sum_of(replace(first, division=Division(0, turned)), second) != 0
