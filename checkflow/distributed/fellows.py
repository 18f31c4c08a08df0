"""The ranks that divide what they have alike: those that see each other's directories, so that each can read all of it.

It is found by a word that each writes into its own directory: where every machine has a disk of its own, the ranks of
one machine see each other; where there is one disk of all, all do.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from checkflow.distributed.group import Group
from checkflow.store.format.ranks import HERE, directory_of


def fellows(group: Group, store: Path, says: Collection[str]) -> dict[str, tuple[int, ...]]:
    """For each of what this rank `says` the ranks, ascending, that say it too and can read each other's parts; every
    rank calls this. Left out is what they do not agree about."""
    word = secrets.token_hex(8)
    with contextlib.suppress(OSError):  # opening the store tells of it
        own = store / directory_of(group.rank, group.size)
        own.mkdir(parents=True, exist_ok=True)
        (own / HERE).write_text(word)
    of_all = gathered(group, dict.fromkeys(says, word))
    words = {rank: _word_in(group, store, rank) for rank, said in enumerate(of_all) if said.keys() & set(says)}
    seen = {each: [rank for rank, found in words.items() if of_all[rank].get(each) == found] for each in says}
    seen_by = gathered(group, seen)
    return {
        each: tuple(ranks)
        for each, ranks in seen.items()
        if ranks and all(seen_by[rank].get(each) == ranks for rank in ranks)
    }


def gathered(group: Group, said: Mapping[str, object]) -> list[dict[str, object]]:
    """What each rank says, by rank; every rank calls this."""
    return [each if isinstance(each, dict) else {} for each in group.gather("attach()", dict(said))]


def _word_in(group: Group, store: Path, rank: int) -> str:
    try:
        return (store / directory_of(rank, group.size) / HERE).read_text()
    except (OSError, ValueError):
        return ""
