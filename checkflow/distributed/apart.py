"""Parameters that ranks had each for itself, as experts, and what becomes of them on another number of ranks.

Rank r takes what the earlier rank of that number modulo theirs had by itself. So where there are fewer now, some of it
is taken by nobody, and where there are more, some is taken twice; either is told. What all had alike is no such thing:
one saved it for all, each a part of it, or their bytes are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from checkflow.distributed.joining import files_of_all, parameters_in
from checkflow.distributed.parts import Complete, RankPart, all_in
from checkflow.distributed.reading import tensors_of
from checkflow.errors import CorruptStoreError, FormatError, InputError, StoreError
from checkflow.state.names import StateName, file_of, holder_of, owner, stems
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.rebuild import brought_together, is_in_parts

_NAMED = 2  # parameters, in a message
Digests = dict[int, dict[str, str]]
"""By earlier rank, of each parameter that is its own: of the bytes of that, and of its optimizer's state."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Of a checkpoint of another number of ranks than `size`, as far as one rank of these has read it.

    `before`: of so many ranks as these the newest checkpoint there is, where the other has fewer.
    """

    parts: Complete
    size: int
    digests: Digests
    before: Complete | None
    digests_before: Digests

    @classmethod
    def of(cls, parts: Complete, rank: int, size: int, store: Path) -> Apart:
        """Each rank reads some of the earlier ones' parts. Raises as `tensors_of`."""
        digests = _digests(parts, range(rank, parts.size, size))
        with contextlib.suppress(CorruptStoreError, FormatError, InputError, StoreError):  # is not what is restored
            of_size = (found for found in all_in(store) if found.size == size > parts.size)
            if (before := next(of_size, None)) is not None:
                return cls(parts, size, digests, before, _digests(before, (rank,)))
        return cls(parts, size, digests, None, {})

    def said(self) -> list[object]:
        """For the other ranks, in JSON."""
        mark = None if self.before is None else [*self.before.mark]
        return [list(self.digests.items()), mark, list(self.digests_before.items())]

    def remarks(self, said: Sequence[object]) -> Iterator[str]:
        """Lines that a person should read, of what all ranks said."""
        digests: Digests = {}
        before: Digests = {}
        marks: list[object] = []
        for each in said:
            assert isinstance(each, list)
            theirs, mark, theirs_before = each
            digests |= {int(number): dict(names) for number, names in theirs}
            before |= {int(number): dict(names) for number, names in theirs_before}
            marks.append(mark)
        is_known = self.before is not None and all(mark == [*self.before.mark] for mark in marks)
        if self.before is not None and is_known and (lost := _lost(self.before, self.parts.size, before)):
            yield (
                f"iteration {self.parts.mark.iteration} was saved by {_ranks(self.parts.size)}, and has not "
                f"{_of_whom(lost)}, which iteration {self.before.mark.iteration} of {_ranks(self.size)} has: "
                f"restore({self.before.mark.iteration}) takes it from there"
            )
            return
        if lost := _lost(self.parts, self.size, digests):
            yield (
                f"no rank restores {_of_whom(lost)}: as many ranks as saved iteration {self.parts.mark.iteration} "
                f"would ({self.parts.size})"
            )
        if copied := _copied(self.parts.size, self.size, digests):
            rank = min(copied)
            more = f", and {_more(len(copied) - 1)} likewise" if len(copied) > 1 else ""
            yield (
                f"rank {rank} restores a copy of rank {rank % self.parts.size}'s own {_names(copied[rank])}{more}: "
                f"iteration {self.parts.mark.iteration} has them of {_ranks(self.parts.size)}, not of {self.size}"
            )


def _lost(parts: Complete, size: int, digests: Digests) -> dict[int, list[str]]:
    """What nobody has where so many ranks restore it, by earlier rank."""

    def held(number: int) -> list[tuple[str, str | None]]:
        own = digests.get(number, {})
        return [(name, own.get(name)) for name in parameters_in(parts.ranks[number].record)]

    taken = {each for number in range(min(size, parts.size)) for each in held(number)}
    found = {number: [each[0] for each in held(number) if each not in taken] for number in range(size, parts.size)}
    return {number: names for number, names in found.items() if names}


def _copied(earlier: int, size: int, digests: Digests) -> dict[int, list[str]]:
    """What a rank has as another one has it, though earlier ranks had different ones."""
    different = {name: len({own[name] for own in digests.values() if name in own}) > 1 for name in _all(digests)}
    found = {
        rank: [name for name in digests.get(rank % earlier, {}) if different[name]] for rank in range(earlier, size)
    }
    return {rank: names for rank, names in found.items() if names}


def _all(digests: Digests) -> set[str]:
    return set().union(*digests.values())


def _digests(parts: Complete, numbers: Collection[int]) -> Digests:
    together = {name for part in parts.ranks for name in (*part.record.shards, *part.record.elsewhere)}
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


def _of_whom(lost: Mapping[int, Sequence[str]]) -> str:
    rank = min(lost)
    more = f", nor what {_more(len(lost) - 1)} had" if len(lost) > 1 else ""
    return f"rank {rank}'s own {_names(lost[rank])}{more}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} other{'s' * (more > 1)}" if more > 0 else "")
