"""What can be restored of a training in several processes: all ranks look at once, and agree on one checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from checkflow.checkpointing.behind_ranks import BehindRanks, Rank, Stock
from checkflow.checkpointing.known import Exchanged, Kept, Noted, exchange
from checkflow.checkpointing.left_behind import named, remains_of, seen_here
from checkflow.checkpointing.left_writing import await_writers
from checkflow.checkpointing.restoring import Nothing, iterations_in
from checkflow.distributed.adopting import Places, Seen, adopt, seen_in
from checkflow.distributed.apart import only_listed
from checkflow.distributed.fellows import strangers
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark, common, newest_first
from checkflow.distributed.partitions import has_state_for
from checkflow.distributed.parts import RankPart, all_in, directories_in, lost, marks_in, noted_in, unread_in
from checkflow.distributed.placement import machine_here
from checkflow.distributed.reading import as_saved
from checkflow.distributed.resharding import is_shared_alike, needed_by, reshaped
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.state.host.record import Record
from checkflow.state.restore.files import TensorFile
from checkflow.store.format.ranks import (
    WHOLE,
    directory_of,
    note_whole,
    noted_whole,
    parse_directory,
    ranks_have,
    ranks_in,
)
from checkflow.store.format.reader import Checkpoint, SkippedCheckpoint, checkpoint_names, load, nothing_is_scarce
from checkflow.training import Training

T = TypeVar("T")


class Seeking:
    """By one rank of a group. `root`: the directory of all; `store`: its own.

    `begin_attempt` is called with the marks that are known, each time that ranks have told each other of them;
    `borrowed` with each part of another rank that was brought for this restore; `tell` is told what is waited for.
    `before`: the ranks that had a directory here before this start made any.
    """

    def __init__(
        self,
        group: Group,
        root: Path,
        store: Path,
        begin_attempt: Callable[[Iterable[Iterable[Mark]]], None],
        borrowed: Callable[[Path], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        before: Collection[int] = (),
    ) -> None:
        self._group = group
        self._root = root
        self._store = store
        self._begin_attempt = begin_attempt
        self._borrowed = borrowed
        self._tell = tell
        self._before = before
        self._near: Collection[int] = ()  # ranks that write to their directories here: once they have a part it is seen
        self._strange: Collection[int] = ()  # ranks that had another place when their directories here were written
        self.behind: BehindRanks | None = None  # the bucket behind the stores

    def own(self) -> Exchanged:
        """The checkpoints that each rank has a part of. A new attempt begins."""
        return self._exchanged(self._kept())[0]

    def newest(
        self, iteration: int | None, read: Callable[[Mark, Kept], T]
    ) -> tuple[T, Checkpoint, tuple[SkippedCheckpoint, ...]] | Nothing:
        """What was read of the newest (of that iteration, if given) that every rank can read; see Together.load."""
        if self.behind is not None:
            self.behind.look()
        kept = self._kept()
        said, seen = self._exchanged(kept)
        places = Places(tuple(map(frozenset, said.own)), said.seen, said.stored)
        shared = common(said.others)  # where each node has a disk of its own, ranks see no others' directories
        everywhere = places.everywhere()
        marks = newest_first({*everywhere, *shared, *said.stored_others}, said.written)
        skipped: list[SkippedCheckpoint] = []
        for mark in marks:
            if iteration is not None and mark.iteration != iteration:
                continue
            wrong: dict[int, object] = {}
            of_own = mark in everywhere and mark not in shared
            if of_own and places.lacking(mark):
                own = {self._group.rank: self._store} if self._group.rank in places.lacking(mark) else {}
                wrong = _by_rank(adopt(self._group, own, mark, places, seen, self._fetch))
            if of_own and not wrong:
                wrong = self._bring_shares(mark, places, seen)
            if not wrong and self.behind is not None and mark not in shared:
                wrong = self._bring_others(mark, said.stored_others.get(mark), self.behind)
            if not wrong:
                kept = self._kept()
                found, wrong = self._read(mark, kept, read)
                if wrong and self._replace_what_is_wrong(mark, kept, places):
                    kept = self._kept()
                    found, wrong = self._read(mark, kept, read)
                if found is not None and not wrong:
                    if iteration is None:
                        unread = self._unread(kept.parts(mark))
                        told = {each.iteration for each in unread}
                        skipped += [
                            *unread,
                            *(e for e in self._lost(mark, marks, said.noted) if e.iteration not in told),
                        ]
                    return found, kept.checkpoint(mark), tuple(skipped)
            rank, reason = next(iter(wrong.items()))
            name = f"iteration {mark.iteration} of attempt {mark.attempt}"
            skipped.append(SkippedCheckpoint(self._store / name, 0, mark.iteration, f"rank {rank}: {reason}"))
        unread = self._unread(())
        if iteration is None and not marks:
            seen_by = self._group.gather("restore()", seen_here(self._root, self._group.size, self._before))
            remains = remains_of(seen_by)
            had_one = any(self._group.gather("restore()", self._had_one()))
            if not had_one and not any(each.may_have_been_whole(self._group.size) for each in remains):
                return Nothing(tuple(named(self._root, seen_by, self._group.rank, remains)))
            self._note_that_one_was_whole()
        skipped += [each for each in unread if iteration in (None, each.iteration)]
        others = self._group.gather("restore()", [path.name for path in self._elsewhere() if path != self._root])
        elsewhere = {name for names in others for name in names}  # type: ignore[attr-defined]
        raise self._none_is_whole(places.own, elsewhere, marks, iteration, skipped)

    def _unread(self, parts: Sequence[RankPart]) -> list[SkippedCheckpoint]:
        """What ranks have that is newer than these of their parts, or than nothing, and cannot be told what it is.

        Raises FormatError for one of another version.
        """
        after = {part.checkpoint.path.parent: part.checkpoint.serial for part in parts} or {self._store: 0}
        own = [(store.name, each) for store, serial in after.items() for each in unread_in(store, serial)]
        said = self._group.gather(
            "restore()", [[str(e.path), e.serial, e.iteration, f"{name}: {e.reason}"] for name, e in own]
        )
        found = {str(path): (serial, iteration, why) for each in said for path, serial, iteration, why in each}  # type: ignore[attr-defined]
        return [SkippedCheckpoint(Path(path), *rest) for path, rest in found.items()]

    def _lost(self, after: Mark, known: Collection[Mark], noted: Noted) -> list[SkippedCheckpoint]:
        """What is newer than this one, none of those that are known, and once had every rank's part on disk."""
        newer = [each for each in noted.items() if each[0][0] > after and each[0][0] not in known]
        return [lost(self._root, mark, size, ranks) for (mark, size), ranks in newer]

    def _read(self, mark: Mark, kept: Kept, read: Callable[[Mark, Kept], T]) -> tuple[T | None, dict[int, object]]:
        """What was read, and by rank what is wrong with it there."""
        try:
            with nothing_is_scarce(self._root):
                found, why = read(mark, kept), ""
        except CorruptStoreError as error:
            found, why = None, str(error)
        return found, _by_rank(self._group.gather("restore()", why))

    def _fetch(self, mark: Mark) -> str:
        return "" if self.behind is None else self.behind.fetch(mark)

    def _replace_what_is_wrong(self, mark: Mark, kept: Kept, places: Places) -> bool:
        """Whether any rank's own part, which does not verify, was there once more; every rank calls this."""
        has_another = mark in kept.mine and mark in places.stored[self._group.rank]
        if has_another:
            try:
                load(kept.mine[mark].checkpoint)
                has_another = False
            except CorruptStoreError:
                has_another = not self._fetch(mark)
        return any(self._group.gather("restore()", has_another))

    def _bring_shares(self, mark: Mark, places: Places, seen: Seen) -> dict[int, object]:
        """Other ranks' parts that have a share of this rank's, and that it cannot see: of ranks that divided what they
        had alike and have no disk in common any more. From who has them, in turns as `_bring_others`; what went wrong,
        by rank, where no bucket may have them."""
        turn, turns = self._turn()
        wrong: dict[int, object] = {}
        for number in range(turns):
            part = marks_in(self._store).get(mark)
            lacking = {} if part is None else dict(self._unseen(mark, part))
            if not any(self._group.gather("restore()", bool(lacking))):
                break
            mine = {} if part is None else {self._group.rank: {mark: part.checkpoint}}
            wanted = lacking if number == turn else {}
            wrong = _by_rank(adopt(self._group, wanted, mark, places.with_own(mark), {**seen, **mine}))
            for store in wanted.values():
                if (found := marks_in(store).get(mark)) is not None:
                    self._borrowed(found.checkpoint.path)
            if wrong:
                break
        return wrong if self.behind is None else {}

    def _unseen(self, mark: Mark, part: RankPart) -> Iterator[tuple[int, Path]]:
        """The ranks with a share of this part that cannot be seen here, and where their parts are looked for."""
        for rank in sorted(set(part.record.elsewhere.values())):
            store = self._root / directory_of(rank, self._group.size)
            if rank not in self._near and mark not in marks_in(store):
                yield rank, store

    def _turn(self) -> tuple[int, int]:
        """This rank's among those of its machine, which may have one disk, and the most turns that any machine has."""
        machines = self._group.gather("restore()", machine_here())
        return machines[: self._group.rank].count(machines[self._group.rank]), max(map(machines.count, machines))

    def _bring_others(self, mark: Mark, size: int | None, behind: BehindRanks) -> dict[int, object]:
        """Download other ranks' parts that this one needs and cannot see on its disks; what went wrong, by rank.

        Of another number of ranks that is all of them, of which each rank begins with some; else those that have a
        share of its own part. Of a machine, which may have one disk, one rank after another does so.
        """
        turn, turns = self._turn()
        wrong: dict[int, object] = {}
        for number in range(-1, turns):
            lacking = behind.lacks(mark, self._needs(mark, size))
            if not any(self._group.gather("restore()", bool(lacking))):
                break
            why = ""
            for rank in lacking:
                if not why and (number == turn or (number < 0 and rank[0] % self._group.size == self._group.rank)):
                    why = behind.fetch(mark, rank)
            wrong = _by_rank(self._group.gather("restore()", why))
            if wrong:
                break
        return wrong

    def _needs(self, mark: Mark, size: int | None) -> list[Rank]:
        if size is not None:
            return [(rank, size) for rank in range(size)]
        part = marks_in(self._store).get(mark)
        return (
            [] if part is None else [(rank, self._group.size) for rank in sorted(set(part.record.elsewhere.values()))]
        )

    def read(self, mark: Mark, kept: Kept, training: Training) -> tuple[Mapping[str, TensorFile], Record]:
        """What this rank restores of it, verified. Raises CorruptStoreError, InputError for what it cannot see."""
        part = kept.mine.get(mark)
        if part is not None and is_shared_alike(part.record, training) and has_state_for(part.record, training):
            return as_saved(part, self._seen(mark, part))
        whole = kept.others.get(mark) or next((found for found in all_in(self._root) if found.mark == mark), None)
        if whole is None:
            raise InputError(
                f"{self._store}: iteration {mark.iteration} was divided among ranks otherwise, and not every rank's "
                "directory can be seen here; put them into one directory"
            )
        found = reshaped(whole, self._group.rank, needed_by(training))
        is_of_others = whole.size != self._group.size
        return found.files, only_listed(found.record, training) if is_of_others else found.record

    def verified(self, mark: Mark, kept: Kept) -> Checkpoint:
        """Verify it: of other ranks than there are now, all that this one may need. Raises CorruptStoreError."""
        parts = (kept.mine[mark],) if mark in kept.mine else kept.others[mark].ranks
        for part in parts:
            load(part.checkpoint)
        return parts[self._group.rank % len(parts)].checkpoint

    def _kept(self) -> Kept:
        others = {parts.mark: parts for parts in all_in(self._root, but=self._group.size)}
        return Kept(marks_in(self._store), others)

    def _exchanged(self, kept: Kept) -> tuple[Exchanged, Seen]:
        """What all ranks know, and what this one sees of others' parts where they do not write: on this machine other
        ranks may have run, and what those had here may be newer than all that ranks have now. A new attempt begins."""
        size, rank = self._group.size, self._group.rank
        self._strange = strangers(self._group, self._root)
        self._near = frozenset(ranks_in(self._root).get(size, ())) - self._strange
        stock = Stock({}, is_known=True) if self.behind is None else self.behind.stock()
        left = [self._root / directory_of(other, size) for other in sorted(self._strange)]
        await_writers(self._group, left, self._tell)
        seen = seen_in(self._root, size, self._strange)
        noted = noted_in(self._root, of=(size, {rank, *self._strange}))
        said = exchange(self._group, kept, stock, noted, seen)
        self._begin_attempt(said.known)
        return said, seen

    def iterations(self) -> list[int]:
        """Of what ranks left, sound or not, newest first; this one's own apart."""
        return iterations_in([*self._elsewhere(), *self._of_others()])

    def _elsewhere(self) -> list[Path]:
        """Of another number of ranks, and of one process."""
        return directories_in(self._root, but=self._group.size)

    def _of_others(self) -> list[Path]:
        size = self._group.size
        found = [self._root / directory_of(rank, size) for rank in ranks_in(self._root).get(size, ())]
        return [path for path in found if path != self._store]

    def _seen(self, mark: Mark, part: RankPart) -> dict[int, RankPart]:
        """Other ranks' parts that have a share of this one, as far as they can be seen here."""
        directories = {
            rank: self._root / directory_of(rank, self._group.size) for rank in part.record.elsewhere.values()
        }
        held = {rank: marks_in(directory) for rank, directory in directories.items()}
        return {rank: marks[mark] for rank, marks in held.items() if mark in marks}

    def _had_one(self) -> bool:
        """Whether every rank once had its part of a checkpoint, of this training or of one in another number."""
        return (
            (self.behind is not None and self.behind.had_one)
            or any((directory / WHOLE).exists() for directory in self._own_and_strange())
            or any(directory == self._root or (directory / WHOLE).exists() for directory in self._elsewhere())
        )

    def _own_and_strange(self) -> list[Path]:
        return [self._store, *(self._root / directory_of(rank, self._group.size) for rank in self._strange)]

    def _note_that_one_was_whole(self) -> None:
        """For the next start, which finds the directory of every rank: this one has made what was missing."""
        for directory in self._own_and_strange():
            if directory.exists() and checkpoint_names(directory) and noted_whole(directory) is None:
                with contextlib.suppress(OSError):
                    note_whole(directory, 0)

    def _none_is_whole(
        self,
        everyone: Sequence[Collection[Mark]],
        elsewhere: Collection[str],
        marks: list[Mark],
        iteration: int | None,
        skipped: list[SkippedCheckpoint],
    ) -> StoreError:
        """Made of what all ranks told each other, so that each has the same reason. `elsewhere`: directories that any
        of them sees of other numbers of ranks."""
        if iteration is not None and not skipped:
            has = sorted({mark.iteration for mark in marks})
            return StoreError(
                f"{self._root}: has no checkpoint of iteration {iteration} that all {self._group.size} ranks "
                f"have; they have {', '.join(map(str, has)) or 'none'}"
            )
        if skipped:
            reasons = "; ".join(map(str, skipped[:3])) + (f"; and {len(skipped) - 3} more" if skipped[3:] else "")
            return CorruptStoreError(
                f"{self._root}: no checkpoint verifies on every rank ({reasons}); restore the store from a copy"
            )
        lacking = [rank for rank, found in enumerate(everyone) if not found]
        why = "the ranks have no iteration of one attempt in common"
        if len(lacking) == self._group.size and elsewhere:
            why = _of_other_numbers(elsewhere)
        elif lacking:
            why = f"{ranks_have(lacking)} none"
        return CorruptStoreError(
            f"{self._root}: no checkpoint is whole, for {why}; restore the missing directories from a copy, or "
            "begin anew with attach(..., start_over=True)"
        )


def _of_other_numbers(directories: Collection[str]) -> str:
    """What there is of jobs of other numbers of ranks, and what is missing of them."""
    there = sorted({parsed for name in directories if (parsed := parse_directory(name))}, key=lambda one: one[::-1])
    all_of_them = [(rank, size) for size in sorted({size for _, size in there}) for rank in range(size)]
    missing = [one for one in all_of_them if one not in there]
    lacking = f"without {_listed(missing)}" if missing else "with none whole in one place"
    return f"of another number of ranks there are only {_listed(there)}, {lacking}"


def _listed(ranks: Sequence[tuple[int, int]]) -> str:
    more = f" and {len(ranks) - 5} more" if ranks[5:] else ""
    return ", ".join(directory_of(rank, size) for rank, size in ranks[:5]) + more


def _by_rank(said: Iterable[object]) -> dict[int, object]:
    """What is not as it should be."""
    return {rank: why for rank, why in enumerate(said) if why}
