"""A training in several processes: each has its part of every checkpoint, and what is restored is one that all have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from checkflow.distributed.agreement import Agreement
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark, common, next_attempt
from checkflow.errors import CorruptStoreError, FormatError, InputError, StoreError
from checkflow.state.host.objects import Member
from checkflow.state.host.record import parse_record
from checkflow.store.format.manifest import RECORD
from checkflow.store.format.ranks import WHOLE, directory_of, ranks_in
from checkflow.store.format.reader import (
    Checkpoint,
    LoadedNewest,
    SkippedCheckpoint,
    checkpoint_names,
    list_checkpoints,
    load,
    nothing_is_scarce,
    read_file,
)


class Together:
    """This process among its training's others. `store` is the directory of all; each rank writes to one in it."""

    def __init__(self, group: Group, store: Path) -> None:
        self.group = group
        self.member = Member(group.rank, group.size)
        self.agreement = Agreement(group)
        self.store = store / directory_of(group.rank, group.size)

    @property
    def is_first(self) -> bool:
        """Whether it is the one that tells a person what is the same on all."""
        return self.group.rank == 0

    def begin(self) -> tuple[Mark, ...]:
        """This rank's store is open: the checkpoints that all ranks have, newest first. A new attempt begins."""
        found = common(self._exchanged(marks_in(self.store)))
        if found:
            (self.store / WHOLE).touch()  # as its saver does, which may have ended before it heard of it
        return found

    def of(self, marks: Sequence[Mark]) -> Checkpoint | None:
        """This rank's part of the first of them; None where there is none."""
        return marks_in(self.store)[marks[0]] if marks else None

    def load(self, iteration: int | None) -> LoadedNewest:
        """The newest checkpoint (of that iteration, if given) of which every rank's part verifies: this rank's part.

        A new attempt begins. None where there has been no checkpoint that every rank had. Raises, on every rank,
        CorruptStoreError where there has been one and none is whole now, StoreError for an iteration not all have.
        """
        mine = marks_in(self.store)
        everyone = self._exchanged(mine)
        marks = [mark for mark in common(everyone) if iteration is None or mark.iteration == iteration]
        skipped: list[SkippedCheckpoint] = []
        for mark in marks:
            checkpoint = mine[mark]
            try:
                with nothing_is_scarce(self.store):
                    loaded, why = load(checkpoint), ""
            except CorruptStoreError as error:
                loaded, why = None, str(error)
            wrong = {rank: said for rank, said in enumerate(self.group.gather("restore()", why)) if said}
            if loaded is not None and not wrong:
                return LoadedNewest(loaded, tuple(skipped))
            rank, reason = next(iter(wrong.items()))
            reason = f"rank {rank}'s part: {reason}"
            skipped.append(SkippedCheckpoint(checkpoint.path, checkpoint.serial, checkpoint.iteration, reason))
        if iteration is None and not any(self.group.gather("restore()", (self.store / WHOLE).exists())):
            return LoadedNewest(None, tuple(self._partial(mine)))
        raise self._none_is_whole(everyone, iteration, skipped)

    def _partial(self, mine: Mapping[Mark, Checkpoint]) -> Iterator[SkippedCheckpoint]:
        """What this rank has of a training that ended before every rank had a checkpoint."""
        for each in mine.values():
            yield SkippedCheckpoint(each.path, each.serial, each.iteration, "not every rank had one yet")

    def fits(self) -> None:
        """Every rank's part fits its training: they may be changed. Raises PeerError where another's does not."""
        self.group.gather("restore()", None)

    def close(self) -> None:
        """Agree on nothing more."""
        self.agreement.close()

    def _exchanged(self, mine: Mapping[Mark, Checkpoint]) -> list[list[Mark]]:
        said = self.group.gather("attach() or restore()", [list(mark) for mark in mine])
        everyone = [[Mark(*mark) for mark in marks] for marks in said if isinstance(marks, list)]
        self.member.attempt = self.agreement.attempt = max(next_attempt(everyone), self.member.attempt + 1)
        return everyone

    def _none_is_whole(
        self, everyone: list[list[Mark]], iteration: int | None, skipped: list[SkippedCheckpoint]
    ) -> StoreError:
        if iteration is not None and not skipped:
            has = sorted({mark.iteration for mark in common(everyone)})
            return StoreError(
                f"{self.store.parent}: has no checkpoint of iteration {iteration} that all {self.group.size} ranks "
                f"have; they have {', '.join(map(str, has)) or 'none'}"
            )
        if skipped:
            reasons = "; ".join(map(str, skipped[:3])) + (f"; and {len(skipped) - 3} more" if skipped[3:] else "")
            return CorruptStoreError(
                f"{self.store.parent}: no checkpoint verifies on every rank ({reasons}); restore the store from a copy"
            )
        lacking = [str(rank) for rank, marks in enumerate(everyone) if not marks]
        why = f"rank {', '.join(lacking)} has none" if lacking else "they have no iteration of one attempt in common"
        return CorruptStoreError(
            f"{self.store.parent}: no checkpoint is whole, for {why}; restore the missing directories from a copy, or "
            "begin anew with attach(..., start_over=True)"
        )


def marks_in(store: Path) -> dict[Mark, Checkpoint]:
    """A rank's checkpoints that say which they are part of; of several of one mark the newest."""
    found: dict[Mark, Checkpoint] = {}
    for checkpoint in list_checkpoints(store):
        if isinstance(checkpoint, SkippedCheckpoint):
            continue
        try:
            with nothing_is_scarce(store):
                record = parse_record(bytes(read_file(checkpoint, RECORD)))
        except (CorruptStoreError, FormatError):  # no part of anything
            continue
        if record.member is not None:
            found.setdefault(Mark(record.member.attempt, record.iteration), checkpoint)
    return found


def check_alone(store: Path) -> None:
    """Raises InputError where a store is of a training in several processes, and this is one."""
    if sizes := _sizes(store):
        raise InputError(
            f"{store}: holds checkpoints of a training in {_counted(sizes)} processes; start as many with torchrun, or "
            "use another store"
        )


def check_size(store: Path, size: int) -> None:
    """Raises InputError where a store is of a training in another number of processes, and of none in this one."""
    sizes = _sizes(store)
    if sizes and size not in sizes:
        raise InputError(
            f"{store}: holds checkpoints of a training in {_counted(sizes)} processes, and this one has {size}; start "
            "as many, or use another store"
        )
    if not sizes and store.exists() and checkpoint_names(store):
        raise InputError(
            f"{store}: holds checkpoints of a training in one process, and this one has {size}; use another store"
        )


def _sizes(store: Path) -> list[int]:
    """Of the trainings that it holds checkpoints of, where those are in several processes: how many."""
    return [
        size
        for size, ranks in ranks_in(store).items()
        if any(checkpoint_names(store / directory_of(rank, size)) for rank in ranks)
    ]


def _counted(sizes: list[int]) -> str:
    return " and in ".join(map(str, sizes))
