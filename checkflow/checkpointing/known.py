"""What ranks know of checkpoints when they look for one to restore, and tell each other."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from checkflow.checkpointing.behind_ranks import Rank, Stock
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Dated, Mark, common, next_attempt
from checkflow.distributed.parts import Complete, RankPart
from checkflow.store.format.reader import Checkpoint

Noted = Mapping[tuple[Mark, int], frozenset[int]]  # see parts.noted_in
_ROOM = 10**6  # attempts: of two lives of a training that do not see each other's both begin one


@dataclass(frozen=True, slots=True)
class Kept:
    """What this rank can read: its own parts, and checkpoints of other numbers of ranks."""

    mine: Mapping[Mark, RankPart]
    others: Mapping[Mark, Complete]

    @property
    def written(self) -> dict[Mark, Dated]:
        """Of those of attempt 0: see marks.newest_first."""
        ones = ((mark, parts.ranks[0].checkpoint) for mark, parts in self.others.items() if not mark.attempt)
        return {mark: Dated(one.manifest.created, is_on_disk=True, serial=one.serial) for mark, one in ones}

    def checkpoint(self, mark: Mark) -> Checkpoint:
        """The directory that stands for one of these."""
        return self.parts(mark)[0].checkpoint

    def parts(self, mark: Mark) -> Sequence[RankPart]:
        """This rank's own of one of these, or all of another number of ranks."""
        return (self.mine[mark],) if mark in self.mine else self.others[mark].ranks


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What ranks have told each other of: by rank its own checkpoints, those of other numbers of ranks that it sees,
    what the bucket has of its own, and what it sees of others', in whose directories that lies; and of other numbers of
    ranks what the bucket has whole, with that number. `noted`: see parts.noted_in, of all ranks together."""

    own: Sequence[Sequence[Mark]]
    others: Sequence[Sequence[Mark]]
    stored: tuple[frozenset[Mark], ...]
    seen: tuple[Mapping[int, frozenset[Mark]], ...]
    stored_others: Mapping[Mark, int]
    noted: Noted
    written: Mapping[Mark, Dated]  # see marks.newest_first
    known: Sequence[Collection[Mark]]  # all marks that there are, and one that leaves a room before the next attempt


def exchange(
    group: Group, kept: Kept, stock: Stock, noted: Noted, seen: Mapping[int, Iterable[Mark]] = MappingProxyType({})
) -> Exchanged:
    """Tell the other ranks what this one knows, and hear what they do. Raises PeerError.

    Nobody sees an attempt of which nothing is written yet, or whose machines are not here: its number has to be another
    one than this, or parts of both could make one checkpoint. So numbers are left out, as many as a draw says, and a
    million more where a bucket did not say what it has.
    """
    stored = [[*rank, list(marks)] for rank, marks in stock.parts.items()]
    draw = secrets.randbelow(_ROOM)  # the first rank's counts: the greatest of many draws would be a narrow one
    once_whole = [[*mark, size, *ranks] for (mark, size), ranks in noted.items()]
    when = [[*mark, *written] for each in (stock.written, kept.written) for mark, written in each.items()]
    strange = [[rank, list(marks)] for rank, marks in seen.items()]
    said = group.gather(
        "attach() or restore()",
        [list(kept.mine), list(kept.others), stored, stock.is_known, draw, once_whole, when, strange],
    )
    own: list[list[Mark]] = []
    others: list[list[Mark]] = []
    of_strange: list[Mapping[int, frozenset[Mark]]] = []
    of_all: dict[tuple[Mark, int], frozenset[int]] = {}
    in_bucket: dict[Rank, frozenset[Mark]] = {}
    written: dict[Mark, Dated] = {}
    all_known = True
    room: int | None = None
    for each in said:
        assert isinstance(each, list)
        mine, others_seen, theirs, is_known, draw, once_whole, when, strange = each
        for attempt, iteration, *found in when:
            mark = Mark(attempt, iteration)
            written[mark] = max(Dated(*found), written.get(mark, Dated(*found)), key=_on_disk_first)
        for attempt, iteration, size, *ranks in once_whole:
            key = (Mark(attempt, iteration), size)
            of_all[key] = of_all.get(key, frozenset()).union(ranks)
        own.append(marks_of(mine))
        others.append(marks_of(others_seen))
        of_strange.append({int(rank): frozenset(marks_of(marks)) for rank, marks in strange})
        in_bucket |= {(rank, size): frozenset(marks_of(marks)) for rank, size, marks in theirs}
        room = int(draw) if room is None else room
        all_known = all_known and bool(is_known)
    strangers = [marks for each in of_strange for marks in each.values()]
    known: list[Collection[Mark]] = [*own, *others, [mark for mark, _ in of_all], *in_bucket.values(), *strangers]
    known.append([Mark(next_attempt(known) + (room or 0) + (0 if all_known else _ROOM), 0)])
    stored_of = tuple(in_bucket.get((rank, group.size), frozenset()) for rank in range(group.size))
    for mark, size in of_all:
        if size == group.size:
            elsewhere = {rank for each in of_strange for rank, marks in each.items() if mark in marks}
            of_all[mark, size] = frozenset(rank for rank, marks in enumerate(own) if mark in marks or rank in elsewhere)
    whole = _whole_of(in_bucket, but=group.size)
    return Exchanged(own, others, stored_of, tuple(of_strange), whole, of_all, written, known)


def _on_disk_first(written: Dated) -> tuple[bool, Dated]:
    return written.is_on_disk, written


def marks_of(said: Iterable[Sequence[int]]) -> list[Mark]:
    """What a rank has sent as JSON."""
    return [Mark(*mark) for mark in said]


def _whole_of(parts: Mapping[Rank, Collection[Mark]], *, but: int) -> dict[Mark, int]:
    """The checkpoints of which every rank's part is among these, of other numbers of ranks than this."""
    sizes = {size for _, size in parts if size != but}
    return {mark: size for size in sizes for mark in common([parts.get((rank, size), ()) for rank in range(size)])}
