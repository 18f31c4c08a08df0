"""The ranks that divide what all have alike: those that see each other's directories, so that each can read all of it.

It is found by a word that each writes into its own directory: where every machine has a disk of its own, the ranks of
one machine see each other; where there is one disk of all, all do.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from checkflow.distributed.group import Group
from checkflow.store.format.ranks import HERE, directory_of


def fellows(group: Group, store: Path, says: str) -> tuple[int, ...]:
    """Ascending, this rank among them. `says`: what each has to say alike; "" of one that divides nothing."""
    word = secrets.token_hex(8)
    with contextlib.suppress(OSError):  # opening the store tells of it
        own = store / directory_of(group.rank, group.size)
        own.mkdir(parents=True, exist_ok=True)
        (own / HERE).write_text(word)
    words = group.gather("attach()", [word, says])
    seen = [rank for rank, said in enumerate(words) if says and said == [_word_in(group, store, rank), says]]
    of_all = group.gather("attach()", seen)
    return tuple(seen) if seen and all(of_all[rank] == seen for rank in seen) else (group.rank,)


def _word_in(group: Group, store: Path, rank: int) -> str:
    try:
        return (store / directory_of(rank, group.size) / HERE).read_text()
    except (OSError, ValueError):
        return ""
