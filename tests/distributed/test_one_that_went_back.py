"""One process went back to an earlier checkpoint on purpose: what it wrote last is the newest for everybody."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_group import groups, together

import checkflow
from checkflow.checkpointing.behind_ranks import BehindRanks
from checkflow.checkpointing.restoring import Nothing
from checkflow.checkpointing.seeking import Seeking
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Dated, Mark, newest_first
from checkflow.distributed.parts import all_in, gathered_in
from checkflow.distributed.stored import parts_in
from checkflow.store.bucket.objects import Objects
from checkflow.store.format.ranks import directory_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """It saved after 5 and 10 iterations, went back to 5, and ended after 7."""
    place = tmp_path_factory.mktemp("back") / "store"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkflow.attach(model, optimizer, store=place, when_full="wait", tell=lambda _: None) as checkpointer:
        for iteration in (*range(1, 11), 6, 7):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if iteration in (5, 10):
                checkpointer.save()
            if iteration == 10:
                assert checkpointer.restore(5) == 5
    yield place


def found_by_two(root: Path, bucket: Path | None = None) -> list[object]:
    """The mark that each of two ranks restores."""

    def seek(group: Group) -> object:
        own = root / directory_of(group.rank, group.size)
        own.mkdir(parents=True, exist_ok=True)
        seeking = Seeking(group, root, own, lambda _: None)
        if bucket is not None:
            hearers, rank = Hearers(lambda _: None, lambda _: None), (group.rank, group.size)
            objects = Objects.open(bucket.as_uri())
            seeking.behind = BehindRanks(objects, own, hearers, rank, root, Agreement(group), start_over=False)
        found = seeking.newest(None, lambda mark, _: mark)
        return found if isinstance(found, Nothing) else found[0]

    return list(together(groups(2), seek))


def test_several_ranks_go_on_from_what_it_wrote_last(store: Path) -> None:
    assert found_by_two(store) == [Mark(0, 7)] * 2


def test_they_do_where_a_bucket_alone_has_it(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "bucket", ignore=shutil.ignore_patterns("lock"))
    assert found_by_two(tmp_path / "disk", tmp_path / "bucket") == [Mark(0, 7)] * 2


def test_all_who_list_checkpoints_have_it_first(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "bucket", ignore=shutil.ignore_patterns("lock"))
    objects = Objects.open((tmp_path / "bucket").as_uri())
    marks = [
        [each.mark for each in all_in(store)],
        [each.mark for each in gathered_in(store)],
        [each.mark for each in parts_in(objects, objects.sizes(), lambda _: None)],
    ]
    assert marks[0][:3] == [Mark(0, 7), Mark(0, 10), Mark(0, 5)]
    assert marks[1] == marks[2] == marks[0]


def test_what_several_have_is_later_and_a_clock_decides_between_disk_and_bucket() -> None:
    written = {
        Mark(0, 9): Dated("2026-01-01T00:00:01Z", is_on_disk=True, serial=4),
        Mark(0, 3): Dated("2026-01-01T00:00:01Z", is_on_disk=True, serial=5),
        Mark(0, 4): Dated("2026-01-01T00:00:02Z", is_on_disk=False, serial=1),
    }
    marks = [Mark(0, 9), Mark(1, 2), Mark(0, 3), Mark(0, 4), Mark(2, 1)]
    assert newest_first(marks, written) == [Mark(2, 1), Mark(1, 2), Mark(0, 4), Mark(0, 3), Mark(0, 9)]
