"""A training in several processes: each has its part of every checkpoint, and what is restored is one that all have."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from checkflow.checkpointing.restoring import Found, Nothing
from checkflow.distributed.adopting import Places, Seen, adopt, has_copies, seen_in
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.fellows import fellows
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark, common, next_attempt
from checkflow.distributed.parts import Complete, RankPart, all_in, directories_in, marks_in
from checkflow.distributed.placement import address_here, machine_here, mirrors
from checkflow.distributed.reading import files_of, whole_file
from checkflow.distributed.resharding import is_divided_alike, needed_by, reshaped
from checkflow.division import Division
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.jsonfile import digest_of
from checkflow.state.divided import sizes_alike
from checkflow.state.host.objects import Member
from checkflow.state.host.record import Record
from checkflow.state.restore.files import TensorFile
from checkflow.store.format.manifest import parse_directory_name
from checkflow.store.format.ranks import COPIES, WHOLE, directory_of
from checkflow.store.format.reader import Checkpoint, SkippedCheckpoint, checkpoint_names, load, nothing_is_scarce
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.mirror_process import MirrorAddress, MirrorProcess
from checkflow.store.trainer.sender import MirrorTarget
from checkflow.training import Training

T = TypeVar("T")


class Together:
    """This process among its training's others. `root` is the directory of all; `store` the one that it writes to."""

    def __init__(self, group: Group, root: Path, tell: Callable[[str], None]) -> None:
        self.group = group
        self.member = Member(group.rank, group.size)
        self.agreement = Agreement(group, lambda line: tell(f"{root}: {line}"))
        self._mirror: MirrorProcess | None = None
        self.root = root
        self.store = root if group.size == 1 else root / directory_of(group.rank, group.size)

    @classmethod
    def here(cls, root: Path, deadline_s: float, tell: Callable[[str], None]) -> Together | None:
        """None where this process trains alone, in a store that has only known such trainings.

        `tell`: called in another thread, with what a person should know while training stands still.
        """
        group = Group.here(deadline_s)
        if group is None and directories_in(root, but=1):
            group = Group.alone()
        return None if group is None else cls(group, root, tell)

    @property
    def is_first(self) -> bool:
        """Whether it is the one that tells a person what is the same on all."""
        return self.group.rank == 0

    def divide(self, training: Training, *, divides: bool) -> Training:
        """The training with who saves what of all that ranks have alike; every rank calls this. `divides`: whether it
        can take a share."""
        sizes_bytes = sizes_alike(training) if divides else {}
        says = digest_of(sizes_bytes) if sizes_bytes else ""
        ranks = fellows(self.group, self.root, says)
        return replace(training, division=Division.of(self.group.rank, ranks, sizes_bytes))

    def mirror(self, handle: StoreHandle, notify: Callable[[str], None]) -> None:
        """Each rank's checkpoints go to the memory of another one's machine, too. Raises StoreError, PeerError."""
        self._mirror = handle.start_mirror(address_here())
        address = self._mirror.address
        said = self.group.gather("attach()", [machine_here(), address.host, address.port, address.key])
        everyone = [each for each in said if isinstance(each, list)]
        machines = [str(each[0]) for each in everyone]
        if self.is_first and len(set(machines)) == 1:
            notify("replicate: all ranks run on one machine, which is lost with what they hold of each other")
        rank = mirrors(machines)[self.group.rank]
        _, host, port, key = everyone[rank]
        target = MirrorTarget(self.group.rank, self.group.size, rank, MirrorAddress(str(host), int(port), str(key)))
        handle.mirror_at(target)

    def begin(self) -> tuple[Mark, ...]:
        """This rank's store is open: the checkpoints that all ranks have, newest first. A new attempt begins."""
        own, _ = self._exchanged(marks_in(self.store), [parts.mark for parts in self._others()])
        found = common(own)
        if found:
            self._note_whole()
        return found

    def of(self, marks: Sequence[Mark]) -> Checkpoint | None:
        """This rank's part of the first of them; None where there is none."""
        return marks_in(self.store)[marks[0]].checkpoint if marks else None

    def load(self, iteration: int | None, training: Training) -> Found | Nothing:
        """The newest checkpoint (of that iteration, if given) of which every part verifies, of however many ranks.

        A new attempt begins. Nothing where there has been no checkpoint that every rank had. Raises, on every rank,
        CorruptStoreError where there has been one and none is whole now, StoreError for an iteration not all have.
        """
        found = self._newest(iteration, lambda mark, mine, others: self._read(mark, mine, others, training))
        if isinstance(found, Nothing):
            return found
        (files, record), checkpoint, skipped = found
        return Found(files, record, checkpoint, skipped)

    def foreseen(self) -> Checkpoint | None:
        """This rank's part of what `load` would find; None where that is nothing. Raises as it does."""
        found = self._newest(None, self._verified)
        return None if isinstance(found, Nothing) else found[0]

    def _newest(
        self, iteration: int | None, read: Callable[[Mark, Mapping[Mark, RankPart], Mapping[Mark, Complete]], T]
    ) -> tuple[T, Checkpoint, tuple[SkippedCheckpoint, ...]] | Nothing:
        """What was read of the first that every rank can read; see `load`."""
        mine, others = marks_in(self.store), {parts.mark: parts for parts in self._others()}
        own, elsewhere = self._exchanged(mine, others)
        places, seen = self._looked_for(own)
        shared = common(elsewhere)  # where each node has a disk of its own, ranks see no others' directories
        marks = sorted({*places.everywhere(), *shared}, reverse=True)
        skipped: list[SkippedCheckpoint] = []
        for mark in marks:
            if iteration is not None and mark.iteration != iteration:
                continue
            wrong: dict[int, object] = {}
            if mark not in shared and places.lacking(mark):
                wrong = _by_rank(adopt(self.group, self.store, mark, places, seen))
                mine = marks_in(self.store)
            if not wrong:
                try:
                    with nothing_is_scarce(self.root):
                        found, why = read(mark, mine, others), ""
                except CorruptStoreError as error:
                    found, why = None, str(error)
                wrong = _by_rank(self.group.gather("restore()", why))
                if found is not None and not wrong:
                    return found, _checkpoint(mark, mine, others), tuple(skipped)
            rank, reason = next(iter(wrong.items()))
            name = f"iteration {mark.iteration} of attempt {mark.attempt}"
            skipped.append(SkippedCheckpoint(self.store / name, 0, mark.iteration, f"rank {rank}: {reason}"))
        if iteration is None and not marks and not any(self.group.gather("restore()", self._had_one())):
            return Nothing(tuple(self._partial(mine)))
        raise self._none_is_whole(places.own, marks, iteration, skipped)

    def _verified(self, mark: Mark, mine: Mapping[Mark, RankPart], others: Mapping[Mark, Complete]) -> Checkpoint:
        """Of other ranks than there are now, all that this one may need."""
        parts = (mine[mark],) if mark in mine else others[mark].ranks
        for part in parts:
            load(part.checkpoint)
        return parts[self.group.rank % len(parts)].checkpoint

    def _read(
        self, mark: Mark, mine: Mapping[Mark, RankPart], others: Mapping[Mark, Complete], training: Training
    ) -> tuple[Mapping[str, TensorFile], Record]:
        if mark in mine and is_divided_alike(mine[mark].record, training):
            part = mine[mark]
            seen = self._seen(mark, part)
            return {name: whole_file(part, name, seen) for name in files_of(part)}, part.record
        whole = others.get(mark) or next((found for found in all_in(self.root) if found.mark == mark), None)
        if whole is None:
            raise InputError(
                f"{self.store}: iteration {mark.iteration} was divided among ranks otherwise, and not every rank's "
                "directory can be seen here; put them into one directory"
            )
        found = reshaped(whole, self.group.rank, needed_by(training))
        return found.files, found.record

    def _seen(self, mark: Mark, part: RankPart) -> dict[int, RankPart]:
        """Other ranks' parts that have a share of this one, as far as they can be seen here."""
        directories = {rank: self.root / directory_of(rank, self.group.size) for rank in part.record.elsewhere.values()}
        held = {rank: marks_in(directory) for rank, directory in directories.items()}
        return {rank: marks[mark] for rank, marks in held.items() if mark in marks}

    def _had_one(self) -> bool:
        """Whether every rank once had its part of a checkpoint, of this training or of one in another number."""
        elsewhere = directories_in(self.root, but=self.group.size)
        return (self.store / WHOLE).exists() or any(
            directory == self.root or (directory / WHOLE).exists() for directory in elsewhere
        )

    def _partial(self, mine: Mapping[Mark, RankPart]) -> Iterator[SkippedCheckpoint]:
        """What this rank has of a training that ended before every rank had a checkpoint."""
        for each in (part.checkpoint for part in mine.values()):
            yield SkippedCheckpoint(each.path, each.serial, each.iteration, "not every rank had one yet")

    def _others(self) -> list[Complete]:
        """Checkpoints of another number of ranks, newest first, as far as this one sees their directories."""
        return all_in(self.root, but=self.group.size)

    def iterations(self) -> list[int]:
        """Of what other numbers of ranks left, sound or not, newest first."""
        names = (name for path in directories_in(self.root, but=self.group.size) for name in checkpoint_names(path))
        return sorted({found.iteration for name in names if (found := parse_directory_name(name))}, reverse=True)

    def fits(self) -> None:
        """Every rank's part fits its training: they may be changed. Raises PeerError where another's does not."""
        self.group.gather("restore()", None)
        shutil.rmtree(self.store / COPIES, ignore_errors=True)  # whoever lacked a part has it now

    def close(self, *, complete: bool) -> None:
        """Agree on nothing more. `complete`: this rank has its last checkpoint on disk, and waits for a little until
        all have theirs."""
        self.agreement.close()
        left = complete and self.group.leave()
        if left and checkpoint_names(self.store):
            self._note_whole()
        if self._mirror is not None:
            self._mirror.close(orderly=left)

    def _note_whole(self) -> None:
        """As its saver does, which may have ended before it heard of it."""
        with contextlib.suppress(OSError):
            (self.store / WHOLE).touch()

    def _exchanged(
        self, mine: Collection[Mark], elsewhere: Collection[Mark]
    ) -> tuple[list[list[Mark]], list[list[Mark]]]:
        """What each rank has itself, and what it sees of other numbers of ranks. A new attempt begins."""
        said = self.group.gather("attach() or restore()", [list(mine), list(elsewhere)])
        pairs = [pair for pair in said if isinstance(pair, list)]
        own, others = ([_marks(pair[which]) for pair in pairs] for which in (0, 1))
        self._begin_attempt([*own, *others])
        return own, others

    def _begin_attempt(self, known: Iterable[Iterable[Mark]]) -> None:
        self.member.attempt = self.agreement.attempt = max(next_attempt(known), self.member.attempt + 1)

    def _looked_for(self, own: Sequence[Collection[Mark]]) -> tuple[Places, Seen]:
        """Where each rank's parts can be read, its own directory apart, and what this one sees of them.

        Looked for where a rank lacks what another one has, or has held copies: else there is nothing to find.
        """
        newest = max((mark for marks in own for mark in marks), default=None)
        lacking = frozenset(rank for rank, marks in enumerate(own) if newest not in marks)
        alone = Places(tuple(map(frozenset, own)), tuple({} for _ in own))
        if not any(self.group.gather("restore()", has_copies(self.root, self.group.size))) and not lacking:
            return alone, {}
        seen = seen_in(self.root, self.group.size, lacking)
        said = self.group.gather("restore()", {str(rank): list(marks) for rank, marks in seen.items()})
        of_all = [{int(rank): frozenset(_marks(marks)) for rank, marks in dict(each).items()} for each in said]  # type: ignore[call-overload]
        self._begin_attempt(marks for each in of_all for marks in each.values())
        return Places(alone.own, tuple(of_all)), seen

    def _none_is_whole(
        self,
        everyone: Sequence[Collection[Mark]],
        marks: list[Mark],
        iteration: int | None,
        skipped: list[SkippedCheckpoint],
    ) -> StoreError:
        if iteration is not None and not skipped:
            has = sorted({mark.iteration for mark in marks})
            return StoreError(
                f"{self.root}: has no checkpoint of iteration {iteration} that all {self.group.size} ranks "
                f"have; they have {', '.join(map(str, has)) or 'none'}"
            )
        if skipped:
            reasons = "; ".join(map(str, skipped[:3])) + (f"; and {len(skipped) - 3} more" if skipped[3:] else "")
            return CorruptStoreError(
                f"{self.root}: no checkpoint verifies on every rank ({reasons}); restore the store from a copy"
            )
        lacking = [str(rank) for rank, found in enumerate(everyone) if not found]
        elsewhere = [path.name for path in directories_in(self.root, but=self.group.size) if path != self.root]
        why = "the ranks have no iteration of one attempt in common"
        if len(lacking) == self.group.size and elsewhere:
            why = f"of another number of ranks there are only {', '.join(elsewhere[:5])}"
        elif lacking:
            why = f"rank {', '.join(lacking)} has none"
        return CorruptStoreError(
            f"{self.root}: no checkpoint is whole, for {why}; restore the missing directories from a copy, or "
            "begin anew with attach(..., start_over=True)"
        )


def _marks(said: Iterable[Sequence[int]]) -> list[Mark]:
    return [Mark(*mark) for mark in said]


def _by_rank(said: Iterable[object]) -> dict[int, object]:
    """What is not as it should be."""
    return {rank: why for rank, why in enumerate(said) if why}


def _checkpoint(mark: Mark, mine: Mapping[Mark, RankPart], others: Mapping[Mark, Complete]) -> Checkpoint:
    return mine[mark].checkpoint if mark in mine else others[mark].ranks[0].checkpoint
