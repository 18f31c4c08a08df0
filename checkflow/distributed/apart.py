"""Parameters that ranks had each for itself, as experts, or a set of them, and what becomes of them on another number.

Rank r takes what the earlier rank of that number modulo theirs had by itself, and ranks that have it in common now what
the first of them would. So where there are fewer now, some of it is taken by nobody, and where there are more, some is
taken twice; either is told. What all had alike is no such thing: one saved it for all, each a part of it, or they have
the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from checkflow.distributed.group import Group
from checkflow.distributed.joining import files_of_all, parameters_in
from checkflow.distributed.parts import Complete, RankPart, all_in
from checkflow.distributed.reading import tensors_of
from checkflow.distributed.resharding import needed_by
from checkflow.distributed.sharing import savers_of
from checkflow.errors import CorruptStoreError, FormatError, InputError, StoreError
from checkflow.extra import key_of
from checkflow.jsonfile import digest_of
from checkflow.state.host.record import Record
from checkflow.state.names import StateName, file_of, holder_of, owner, stems
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.rebuild import brought_together, is_in_parts
from checkflow.training import Training

_NAMED = 2  # parameters, in a message
Digests = dict[int, dict[str, str]]
"""By earlier rank, of each parameter that is its own: of the bytes of that, and of its optimizer's state."""
Leads = Mapping[str, int]
"""Of parameters that a rank has in common with others now: the lowest of them."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Of a checkpoint of another number of ranks than `size`, as far as one rank of these has read it.

    `before`: of so many ranks as these the newest checkpoint there is, where the other has fewer.
    """

    parts: Complete
    size: int
    leads: Leads
    unlisted: Sequence[str]
    digests: Digests
    before: Complete | None
    digests_before: Digests

    @classmethod
    def of(cls, parts: Complete, training: Training, group: Group, store: Path) -> Apart:
        """Each rank reads some of the earlier ones' parts. Raises as `tensors_of`."""
        rank, size = group.rank, group.size
        digests = _digests(parts, range(rank, parts.size, size))
        common, where = _in_common(parts), needed_by(training)
        leads = {
            str(name): lowest
            for part in parts.ranks
            for name in parameters_in(part.record)
            if name not in common and (lowest := where(name, _shape(part, name)).lowest) is not None
        }
        unlisted = _unlisted(parts.ranks[rank % parts.size].record, training)
        with contextlib.suppress(CorruptStoreError, FormatError, InputError, StoreError):  # is not what is restored
            of_size = (found for found in all_in(store) if found.size == size > parts.size)
            if (before := next(of_size, None)) is not None:
                return cls(parts, size, leads, unlisted, digests, before, _digests(before, (rank,)))
        return cls(parts, size, leads, unlisted, digests, None, {})

    def said(self) -> list[object]:
        """For the other ranks, in JSON."""
        mark = None if self.before is None else [*self.before.mark]
        return [
            list(self.digests.items()),
            mark,
            list(self.digests_before.items()),
            dict(self.leads),
            list(self.unlisted),
        ]

    def remarks(self, said: Sequence[object]) -> Iterator[str]:
        """Lines that a person should read, of what all ranks said."""
        digests: Digests = {}
        before: Digests = {}
        marks: list[object] = []
        leads: list[Leads] = []
        unlisted: dict[int, list[str]] = {}
        for rank, each in enumerate(said):
            assert isinstance(each, list)
            theirs, mark, theirs_before, its_leads, its_unlisted = each
            leads.append(its_leads)
            unlisted |= {rank: its_unlisted} if its_unlisted else {}
            digests |= {int(number): dict(names) for number, names in theirs}
            before |= {int(number): dict(names) for number, names in theirs_before}
            marks.append(mark)
        is_known = self.before is not None and all(mark == [*self.before.mark] for mark in marks)
        if unlisted:
            rank = min(unlisted)
            yield (
                f"rank {rank} leaves out {_names(unlisted[rank])}, which rank {rank % self.parts.size} of iteration "
                f"{self.parts.mark.iteration} listed and it does not{_likewise(unlisted)}"
            )
        digests = _of_sets(self.parts, digests)
        if self.before is not None and is_known and (lost := _lost_between(self.before, self.parts, before)):
            yield (
                f"iteration {self.parts.mark.iteration} was saved by {_ranks(self.parts.size)}, and has not "
                f"{_of_whom(lost)}, which iteration {self.before.mark.iteration} of {_ranks(self.size)} has: "
                f"restore({self.before.mark.iteration}) takes it from there"
            )
            return
        if lost := _lost(self.parts, leads, digests):
            yield (
                f"no rank restores {_of_whom(lost)}: as many ranks as saved iteration {self.parts.mark.iteration} "
                f"would ({self.parts.size})"
            )
        if copied := _copied(self.parts.size, leads, digests):
            rank = min(copied)
            yield (
                f"rank {rank} restores a copy of rank {rank % self.parts.size}'s own {_names(copied[rank])}"
                f"{_likewise(copied)}: "
                f"iteration {self.parts.mark.iteration} has them of {_ranks(self.parts.size)}, not of {self.size}"
            )


def only_listed(record: Record, training: Training) -> Record:
    """Of another number of ranks the record without what was listed as extra, and is not by this one."""
    unlisted = _unlisted(record, training)
    models = tuple(each for each in record.models if each.name not in unlisted)
    return record.model_copy(
        update={"models": models, "objects": tuple(each for each in record.objects if each.name not in unlisted)}
    )


def _unlisted(record: Record, training: Training) -> list[str]:
    names = [*(each.name for each in record.models), *(each.name for each in record.objects)]
    return [name for name in names if key_of(name) is not None and name not in training.listed.holders]


def _lost(parts: Complete, leads: Sequence[Leads], digests: Digests) -> dict[int, list[str]]:
    """What nobody has where so many ranks restore it, by earlier rank. `leads`: of each of these ranks."""

    def held(number: int) -> list[tuple[str, str | None]]:
        own = digests.get(number, {})
        return [(name, own.get(name)) for name in parameters_in(parts.ranks[number].record)]

    taken = {
        (name, digests.get(its.get(name, rank) % parts.size, {}).get(name))
        for rank, its in enumerate(leads)
        for name, _ in held(rank % parts.size)
    }
    found = {number: [each[0] for each in held(number) if each not in taken] for number in range(parts.size)}
    return {number: names for number, names in found.items() if names}


def _lost_between(before: Complete, parts: Complete, digests: Digests) -> dict[int, list[str]]:
    """What the ranks of a later checkpoint did not have of an earlier one's."""
    leads = [
        {name: shard.lowest for name, shard in part.record.shards.items() if shard.lowest is not None}
        for part in parts.ranks
    ]
    return _lost(before, leads, _of_sets(before, digests))


def _copied(earlier: int, leads: Sequence[Leads], digests: Digests) -> dict[int, list[str]]:
    """What a rank has as another one has it, though earlier ranks had different ones."""
    different = {name: len({own[name] for own in digests.values() if name in own}) > 1 for name in _all(digests)}
    found = {
        rank: [
            name
            for name in digests.get(rank % earlier, {})
            if different[name] and leads[rank].get(name, rank) >= earlier
        ]
        for rank in range(earlier, len(leads))
    }
    return {rank: names for rank, names in found.items() if names}


def _all(digests: Digests) -> set[str]:
    return set().union(*digests.values())


def _in_common(parts: Complete) -> set[str]:
    """What ranks save for each other, or share, all that have it in one set."""
    sets: dict[str, set[int | None]] = {}
    for part in parts.ranks:
        for name, shard in part.record.shards.items():
            sets.setdefault(name, set()).add(shard.lowest)
    elsewhere = {name for part in parts.ranks for name in part.record.elsewhere if name not in sets}
    return elsewhere | {name for name, found in sets.items() if len(found) == 1}


def _of_sets(parts: Complete, digests: Digests) -> Digests:
    """The same where what a rank shares with others of its set is of all that these have of it."""
    found: dict[tuple[str, int | None], str] = {}

    def of_set(rank: int, name: str, own: str) -> str:
        shard = parts.ranks[rank].record.shards.get(name)
        if shard is None:
            return own
        if (key := (name, shard.lowest)) not in found:
            savers = savers_of(parts, rank, StateName(name)).items()
            pieces = {str(place.offsets): digests.get(numbers[0], {}).get(name) for place, numbers in savers}
            found[key] = digest_of(pieces)
        return found[key]

    return {rank: {name: of_set(rank, name, own) for name, own in its.items()} for rank, its in digests.items()}


def _shape(part: RankPart, name: StateName) -> tuple[int, ...]:
    shard = part.record.shards.get(name)
    return () if shard is None else shard.shape


def _digests(parts: Complete, numbers: Collection[int]) -> Digests:
    together = _in_common(parts)
    first = parts.ranks[0].record
    alike = all(
        is_in_parts(part.record) == is_in_parts(first) and part.record.lanes == first.lanes for part in parts.ranks
    )
    found: Digests = {}
    for number in numbers:
        part = parts.ranks[number]
        own = [name for name in parameters_in(part.record) if name not in together]
        found[number] = _digests_of(part, own, _files(part, as_saved=alike)) if own else {}
    return found


def _files(part: RankPart, *, as_saved: bool) -> Iterator[tuple[str, TensorFile]]:
    """Of models and optimizers. Updates are made again only where ranks left them to different iterations."""
    record = part.record
    in_parts = part.gathered() if is_in_parts(record) else None
    if in_parts is not None and not as_saved:
        in_parts = brought_together(record, in_parts)
    divided = {file_of(optimizer.name) for optimizer in record.optimizers if optimizer.partition is not None}
    there = {entry.name for entry in part.checkpoint.manifest.tensor_files} if in_parts is None else in_parts.keys()
    for name in sorted(there & files_of_all(record) - divided):
        yield name, tensors_of(part, name) if in_parts is None else in_parts[name]


def _digests_of(part: RankPart, own: Sequence[StateName], files: Iterator[tuple[str, TensorFile]]) -> dict[str, str]:
    hashes = {name: xxhash.xxh3_128() for name in own}
    for file, found in files:
        holder = holder_of(file)
        optimizers = [optimizer for optimizer in part.record.optimizers if optimizer.file == file]
        groups = (group for optimizer in optimizers for group in optimizer.groups)
        by_stem = {
            stem: name for name, stem in stems(holder, (StateName(n) for g in groups for n in g.parameters)).items()
        }
        for path in sorted({*found.tensors, *found.aliases}):
            state = StateName.of(holder, path)
            whose = owner(state, by_stem) if optimizers else state
            if whose in hashes:
                hashes[whose].update(path.encode())
                hashes[whose].update(found.tensors[found.aliases.get(path, path)].data)
    return {name: each.hexdigest() for name, each in hashes.items()}


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _more(count: int) -> str:
    return "one more rank" if count == 1 else f"{count} more ranks"


def _likewise(by_rank: Mapping[int, Sequence[str]]) -> str:
    return f", and {_more(len(by_rank) - 1)} likewise" if len(by_rank) > 1 else ""


def _of_whom(lost: Mapping[int, Sequence[str]]) -> str:
    rank = min(lost)
    more = f", nor what {_more(len(lost) - 1)} had" if len(lost) > 1 else ""
    return f"rank {rank}'s own {_names(lost[rank])}{more}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} other{'s' * (more > 1)}" if more > 0 else "")
