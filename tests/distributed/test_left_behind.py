"""A job that was killed before its ranks noted a whole checkpoint: what may be lost is refused, the rest is named."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from job_of_ranks import Job
from test_group import groups, together

from checkflow.checkpointing.left_behind import Remains, remains_of
from checkflow.checkpointing.restoring import Nothing
from checkflow.checkpointing.together import Together
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark
from checkflow.store.format.ranks import WHOLE


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of two ranks, with what a killed one has."""
    store = tmp_path_factory.mktemp("killed") / "store"
    with Job(2, "ddp", store, 2, 0) as job:
        job.done()
    for rank in range(2):
        (store / f"rank-{rank}-of-2" / WHOLE).unlink()
    yield store


def found(root: Path, size: int) -> list[object]:
    """What each rank of so many finds when it starts, its error or what it names and leaves aside."""

    def start(group: Group) -> object:
        ranks = Together.of(group, root, print, Hearers(print, print))
        assert ranks is not None
        ranks.store.mkdir(exist_ok=True)
        seen = ranks._seeking.newest(None, lambda mark, _: mark)
        ranks.close()
        return [str(each) for each in seen.skipped] if isinstance(seen, Nothing) else seen[0]

    return [each if isinstance(each, list) else str(each) for each in together(groups(size), start)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_directory_that_is_gone_is_a_refusal_and_stays_one(left: Path, tmp_path: Path, size: int) -> None:
    """Also once the start that was refused has made that directory, without anything in it."""
    store = Path(shutil.copytree(left, tmp_path / "store"))
    shutil.rmtree(store / "rank-1-of-2")
    others = "of another number of ranks there are only rank-0-of-2, without rank-1-of-2"
    why = "rank 1 has none" if size == 2 else others
    for _ in range(2):
        assert all(f"no checkpoint is whole, for {why}" in str(each) for each in found(store, size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_where_every_rank_was_there_and_one_has_none_the_job_begins_and_says_so(
    left: Path, tmp_path: Path, size: int
) -> None:
    store = Path(shutil.copytree(left, tmp_path / "store"))
    for path in (store / "rank-1-of-2").glob("*-iteration-*"):
        shutil.rmtree(path)
    first, *others = found(store, size)
    assert isinstance(first, list) and others == [[]] * (size - 1)
    assert any(line.endswith("-iteration-2: rank-0-of-2: rank 1 has no checkpoint") for line in first)


def test_a_checkpoint_whose_parts_are_in_several_places_is_a_refusal(left: Path, tmp_path: Path) -> None:
    """A job of three, each of whose ranks has a disk of its own; none has both parts."""

    def start(group: Group) -> object:
        root = tmp_path / f"{group.rank}"
        if group.rank < 2:
            shutil.copytree(left / f"rank-{group.rank}-of-2", root / f"rank-{group.rank}-of-2")
        ranks = Together.of(group, root, print, Hearers(print, print))
        assert ranks is not None
        return ranks._seeking.newest(None, lambda mark, _: mark)

    (why,) = reasons(together(groups(3), start))
    assert why == "of another number of ranks there are only rank-0-of-2, rank-1-of-2, with none whole in one place"


def test_each_rank_has_the_same_reason_whoever_sees_a_part(left: Path, tmp_path: Path) -> None:
    """A job of three, each of whose ranks has a disk of its own; the second's has one part of two, the third's another
    job's."""

    def start(group: Group) -> object:
        root = tmp_path / f"{group.rank}"
        for rank, name in enumerate((None, "rank-1-of-2", "rank-6-of-9")):
            if group.rank == rank and name is not None:
                shutil.copytree(left / "rank-1-of-2", root / name)
        ranks = Together.of(group, root, print, Hearers(print, print))
        assert ranks is not None
        return ranks._seeking.newest(None, lambda mark, _: mark)

    (why,) = reasons(together(groups(3), start))
    assert why == (
        "of another number of ranks there are only rank-1-of-2, rank-6-of-9, without rank-0-of-2, rank-0-of-9, "
        "rank-1-of-9, rank-2-of-9, rank-3-of-9 and 4 more"
    )


def reasons(said: Iterable[object]) -> set[str]:
    """Why no checkpoint is whole, as ranks have it."""
    return {str(each).partition("no checkpoint is whole, for ")[2].partition(";")[0] for each in said}


def test_what_nobody_can_read_may_have_been_whole() -> None:
    one = [["rank-0-of-2", [[5, 1]], False], ["rank-1-of-2", [], False]]
    assert remains_of([one]) == [Remains(2, {0: frozenset({Mark(5, 1)}), 1: frozenset()}, has_unread=False)]
    assert [each.may_have_been_whole(2) for each in remains_of([one])] == [False]
    damaged = ["rank-1-of-2", [], True]
    assert [each.may_have_been_whole(2) for each in remains_of([one, [damaged]])] == [True]
    assert [each.may_have_been_whole(3) for each in remains_of([[["rank-0-of-3", [], False]]])] == [False]
