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
from checkflow.store.format.ranks import HERE, directory_of, ranks_in


def fellows(group: Group, store: Path, says: Collection[str]) -> dict[str, tuple[int, ...]]:
    """For each of what this rank `says` the ranks, ascending, that say it too and can read each other's parts; every
    rank calls this. Left out is what they do not agree about."""
    own = store / directory_of(group.rank, group.size)
    with contextlib.suppress(OSError):  # opening the store tells of it
        own.mkdir(parents=True, exist_ok=True)
    word = _written(own)
    of_all = gathered(group, "attach()", dict.fromkeys(says, word))
    words = {rank: _word_in(group, store, rank) for rank, said in enumerate(of_all) if said.keys() & set(says)}
    seen = {each: [rank for rank, found in words.items() if of_all[rank].get(each) == found] for each in says}
    seen_by = gathered(group, "attach()", seen)
    return {
        each: tuple(ranks)
        for each, ranks in seen.items()
        if ranks and all(seen_by[rank].get(each) == ranks for rank in ranks)
    }


def strangers(group: Group, root: Path) -> frozenset[int]:
    """The ranks whose directories here are not those that they write to: left by another rank that ran on this machine,
    or brought here. Every rank calls this."""
    own = root / directory_of(group.rank, group.size)
    words = group.gather("attach() or restore()", _written(own) if own.is_dir() else "")
    others = (rank for rank in ranks_in(root).get(group.size, ()) if rank != group.rank)
    return frozenset(rank for rank in others if not words[rank] or _word_in(group, root, rank) != words[rank])


def _written(own: Path) -> str:
    """A word that is now in this directory; "" where none can be written."""
    word = secrets.token_hex(8)
    try:
        (own / HERE).write_text(word)
    except OSError:
        return ""
    return word


def gathered(group: Group, what: str, said: Mapping[str, object]) -> list[dict[str, object]]:
    """What each rank says, by rank; every rank calls this. `what` is the occasion, as for `Group.gather`."""
    return [each if isinstance(each, dict) else {} for each in group.gather(what, dict(said))]


def _word_in(group: Group, store: Path, rank: int) -> str:
    try:
        return (store / directory_of(rank, group.size) / HERE).read_text()
    except (OSError, ValueError):
        return ""
