"""A program that closes all descriptors, and opens files of its own that have their numbers then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from small_store import SMALL

from checkflow.store.both.lock import StoreLock
from checkflow.store.trainer.handle import StoreHandle

TEXT = b"of the program's own"


@contextmanager
def taken(path: Path, numbers: list[int]) -> Iterator[list[Path]]:
    """Files of the program's own have these numbers here; they are open, and as they were, when it ends."""
    paths, before = [path / f"file-{number}" for number in numbers], [os.dup(number) for number in numbers]
    for own, number in zip(paths, numbers, strict=True):
        own.write_bytes(TEXT)
        fd = os.open(own, os.O_RDWR)
        os.dup2(fd, number)
        os.close(fd)
    yield paths
    for own, number, again in zip(paths, numbers, before, strict=True):
        assert own.read_bytes() == TEXT
        assert os.fstat(number).st_ino == own.stat().st_ino, "nobody else closed it"
        os.dup2(again, number, inheritable=False)
        os.close(again)


def test_a_lock_touches_no_file_that_has_its_number(tmp_path: Path) -> None:
    lock = StoreLock.acquire(tmp_path / "store", print)
    numbers = [lock.directory_fd, lock.saver_fd, lock._trainer.directory_fd, lock._trainer.file_fd]
    with taken(tmp_path, numbers):
        lock.name_holder(None)
        lock.close()
    for number in numbers:
        os.close(number)


def test_who_starts_savers_writes_to_no_file_that_has_its_number(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path / "store", [SMALL]) as handle:
        keeper = handle._saver._keeper
        with taken(tmp_path, [keeper._wake]):
            keeper._stir()
            keeper._close_wake()
