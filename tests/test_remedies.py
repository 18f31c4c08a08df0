"""What is advised where the system says no."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from checkflow.errors import remedy
from checkflow.store.both.beside import unstarted
from checkflow.store.format.ranks import no_store


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "mount it writable"),
        (errno.EMFILE, "allow more open files (ulimit -n)"),
        (errno.EACCES, "give this user the right to write there"),
        (errno.ENOTDIR, "check the path"),
    ],
)
def test_advice_is_of_what_was_said(number: int, advice: str) -> None:
    assert remedy(system(number), "check the path") == advice


def test_a_process_that_cannot_be_started_is_told_with_what_would_do() -> None:
    told = [str(unstarted("saver: cannot be started", system(number))) for number in (errno.EMFILE, errno.ENOEXEC)]
    assert told == [
        "saver: cannot be started (Too many open files); allow more open files (ulimit -n)",
        "saver: cannot be started (Exec format error); free processes or memory",
    ]


def test_who_may_not_read_a_store_is_told_so() -> None:
    """A path that is wrong is another matter."""
    line = str(no_store(Path("store"), system(errno.EACCES)))
    assert line == "store: is no store that can be read (Permission denied); give this user the right to read there"
    assert str(no_store(Path("store"), system(errno.ENOTDIR))).endswith("(Not a directory); check the path")
