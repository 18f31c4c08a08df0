"""What was downloaded of other ranks goes once nobody reads it, and nothing else does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkflow.checkpointing.borrowed import BORROWED, Borrowed
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.ranks import directory_of

OWN, OTHER = directory_of(0, 3), directory_of(1, 2)
ATTEMPT = 7


def checkpoint(store: Path, serial: int, borrowed: str = "") -> Path:
    found = store / f"{serial:08d}-iteration-3"
    found.mkdir(parents=True)
    (found / "manifest.json").write_text("{}")
    if borrowed:
        (found / BORROWED).write_text(borrowed)
    return found


def given_back(root: Path, attempt: int = ATTEMPT) -> None:
    borrowed = Borrowed(root, root / OWN)
    borrowed.give_back(attempt)
    borrowed.close()


@pytest.mark.parametrize("where", ["", OTHER, directory_of(1, 3)])
def test_it_is_removed_with_the_directory_that_was_made_for_it(where: str, tmp_path: Path) -> None:
    """Also of a life that ended before it could."""
    found, own = checkpoint(tmp_path / where, 1), checkpoint(tmp_path / OWN, 1)
    Borrowed(tmp_path, tmp_path / OWN).add(found, ATTEMPT)
    given_back(tmp_path, ATTEMPT - 1)
    assert found.exists(), "of an attempt of which no checkpoint was verified yet"
    given_back(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / OWN] and own.exists()


@pytest.mark.parametrize("beside", ["", f"{ATTEMPT + 1}\n", "yesterday"])
def test_where_anything_else_lies_all_stays(beside: str, tmp_path: Path) -> None:
    """Ranks went on from what was borrowed, another attempt reads it, or nobody knows which; and what is this one's."""
    stay = [
        checkpoint(tmp_path / OTHER, 1, f"{ATTEMPT}\n"), checkpoint(tmp_path / OTHER, 2, beside),
        checkpoint(tmp_path / OWN, 1, f"{ATTEMPT}\n"),
    ]  # fmt: skip
    gone = checkpoint(tmp_path, 1, "0\n")
    given_back(tmp_path)
    assert all(each.exists() for each in stay) and not gone.exists()


def test_ranks_of_one_disk_do_it_at_once(tmp_path: Path) -> None:
    """Nothing is left, whoever comes first."""
    for _ in range(30):
        checkpoint(tmp_path / OWN, 1)
        for rank in range(2):
            checkpoint(tmp_path / directory_of(rank, 2), 1, f"{ATTEMPT}\n")
        each = [Borrowed(tmp_path, tmp_path / OWN) for _ in range(3)]
        for borrowed in each:
            borrowed.give_back(ATTEMPT)
        for borrowed in each:
            borrowed.close()
        assert list(tmp_path.iterdir()) == [tmp_path / OWN]
        shutil.rmtree(tmp_path / OWN)


def test_a_directory_that_a_training_has_or_had_is_left_to_it(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / OTHER, 1, f"{ATTEMPT}\n")
    lock = StoreLock.acquire(tmp_path / OTHER, lambda _: None)
    given_back(tmp_path)
    assert found.exists()
    lock.close()
    given_back(tmp_path)
    assert found.exists(), "it may have gone on from it"
