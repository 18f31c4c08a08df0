"""What was downloaded of other ranks goes once nobody reads it, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkflow.checkpointing.borrowed import BORROWED, Borrowed
from checkflow.store.both.lock import LOCK, StoreLock
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


def test_what_is_beside_it_stays(tmp_path: Path) -> None:
    """What ranks wrote themselves, this rank's own, and marks that nobody can read."""
    gone = [checkpoint(tmp_path / OTHER, 1, f"{ATTEMPT}\n"), checkpoint(tmp_path, 1, "0\n")]
    stay = [
        checkpoint(tmp_path / OTHER, 2), checkpoint(tmp_path / OTHER, 3, f"{ATTEMPT + 1}\n"),
        checkpoint(tmp_path / OTHER, 4, "yesterday"), checkpoint(tmp_path / OWN, 1, f"{ATTEMPT}\n"),
    ]  # fmt: skip
    (tmp_path / OTHER / LOCK).touch()
    given_back(tmp_path)
    assert not any(each.exists() for each in gone)
    assert all(each.exists() for each in stay) and (tmp_path / OTHER / LOCK).exists()


def test_a_directory_that_a_training_has_is_left_to_it(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / OTHER, 1, f"{ATTEMPT}\n")
    lock = StoreLock.acquire(tmp_path / OTHER, lambda _: None)
    given_back(tmp_path)
    assert found.exists()
    lock.close()
    given_back(tmp_path)
    assert not found.exists()
