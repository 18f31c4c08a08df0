"""The directory of each rank, in the store of a job of several processes. Each is a store by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from checkflow.errors import StoreError, remedy
from checkflow.store.format.regular_file import open_regular, read_at

WHOLE = "whole"  # a file in a rank's directory: every rank had all its part of a checkpoint on disk; its serial here
HERE = "here"  # a file in a rank's directory: a word by which others know that they see what it writes
COPIES = "copies"  # in a rank's directory: what it held of other ranks' when their training ended
_SERIAL_BYTES = 20  # has room for any
_DIRECTORY = re.compile(r"rank-(?P<rank>0|[1-9]\d{0,6})-of-(?P<size>[1-9]\d{0,6})")


def directory_of(rank: int, size: int) -> str:
    """(3, 8) -> "rank-3-of-8"."""
    return f"rank-{rank}-of-{size}"


def parse_directory(name: str) -> tuple[int, int] | None:
    """The inverse; None for another name."""
    match = _DIRECTORY.fullmatch(name)
    if match is None or int(match["rank"]) >= int(match["size"]):
        return None
    return int(match["rank"]), int(match["size"])


def ranks_in(store: Path) -> dict[int, tuple[int, ...]]:
    """The number of processes of each job that a store has directories of -> the ranks that have one, ascending.

    Empty for the store of one process, and for what does not exist. Raises StoreError for what cannot be read.
    """
    try:
        names = os.listdir(store)  # noqa: PTH208 (only the names)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise no_store(store, error) from None
    found: dict[int, list[int]] = {}
    for name in names:
        if (parsed := parse_directory(name)) is not None:
            found.setdefault(parsed[1], []).append(parsed[0])
    return {size: tuple(sorted(ranks)) for size, ranks in sorted(found.items())}


def no_store(store: Path, error: OSError | ValueError) -> StoreError:
    """What is to be raised where what is in a store cannot be listed; ValueError: there is no such path."""
    why, what = str(error), "check the path"
    if isinstance(error, OSError):
        why, what = error.strerror or why, remedy(error, what, to="read")
    return StoreError(f"{store}: is no store that can be read ({why}); {what}")


def ranks_have(ranks: Sequence[int]) -> str:
    """(1,) -> "rank 1 has"; (1, 2) -> "ranks 1, 2 have"."""
    named = ", ".join(map(str, ranks))
    return f"ranks {named} have" if len(ranks) > 1 else f"rank {named} has"


def note_whole(directory: Path, serial: int) -> None:
    """Of this checkpoint in a rank's directory every rank has its part on disk, and of none that is there and newer; 0:
    of none that is there. Raises OSError."""
    fd = open_regular(directory / WHOLE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.pwrite(fd, b"%d\n" % serial, 0)
    finally:
        os.close(fd)


def noted_whole(directory: Path) -> int | None:
    """The serial that was noted last; 0 where none is named, None where there was none."""
    try:
        fd = open_regular(directory / WHOLE, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = read_at(fd, 0, _SERIAL_BYTES).strip()
    except OSError:
        return None
    finally:
        os.close(fd)
    return int(text) if text.isdigit() else 0


def copy_of(rank: int, size: int) -> Path:
    """Where another rank's directory has a copy of this one's."""
    return Path(COPIES) / directory_of(rank, size)
