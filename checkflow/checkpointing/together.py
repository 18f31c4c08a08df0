"""A training in several processes: each has its part of every checkpoint, and what is restored is one that all have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from checkflow.checkpointing.behind_ranks import BehindRanks
from checkflow.checkpointing.borrowed import Borrowed
from checkflow.checkpointing.held_for_others import HeldForOthers
from checkflow.checkpointing.known import Kept
from checkflow.checkpointing.left_writing import await_writers
from checkflow.checkpointing.restoring import Found, Nothing
from checkflow.checkpointing.seeking import Seeking
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.apart import Apart
from checkflow.distributed.fellows import fellows, gathered
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark, common, next_attempt
from checkflow.distributed.parts import RankPart, directories_in, marks_in, newest_part, places_in
from checkflow.division import Division
from checkflow.errors import InputError, PeerError, StoreError
from checkflow.jsonfile import digest_of
from checkflow.schedule import Schedule
from checkflow.state.divided import Alike, alike_in, content_of, saved_here, shared_out
from checkflow.state.host.objects import Member
from checkflow.state.host.record import Record
from checkflow.state.live import entry_stems, parameter_names, parameters_of
from checkflow.state.names import StateName, owner
from checkflow.state.restore import Restored
from checkflow.state.restore.files import TensorFile
from checkflow.state.shards import give_back_gathered
from checkflow.store.bucket.names import has_ranks
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.manifest import parse_directory_name
from checkflow.store.format.ranks import directory_of, note_whole, noted_whole, ranks_in
from checkflow.store.format.reader import Checkpoint, checkpoint_names
from checkflow.store.trainer.handle import StoreHandle
from checkflow.training import Training


class Together:
    """This process among its training's others. `root` is the directory of all; `store` the one that it writes to."""

    def __init__(
        self,
        group: Group,
        root: Path,
        aside: Callable[[str], None],
        hearers: Hearers = Hearers(lambda _: None, lambda _: None),  # noqa: B008 (frozen)
        before: Collection[int] = (),
    ) -> None:
        self.group = group
        self._notify = hearers.notify
        self.member = Member(group.rank, group.size)
        self.agreement = Agreement(group, lambda line: aside(f"{root}: {line}"))
        self.agreement.vouches = self.member.vouches
        self._stored: tuple[Mark, ...] = ()
        self._chosen = ""  # what is being restored
        self._to_mirror: Mark | None = None  # that, where mirrors are to have what is restored
        self.root = root
        self.store = root if group.size == 1 else root / directory_of(group.rank, group.size)
        self._borrowed = Borrowed(root, self.store)
        self._held = HeldForOthers(group, self.store, hearers)
        self._seeking = Seeking(
            group,
            root,
            self.store,
            self._begin_attempt,
            lambda path: Borrowed.add(path, self.agreement.attempt),
            hearers.tell,
            before,
        )
        self.agreement.on_whole = self._give_back

    @classmethod
    def of(
        cls,
        group: Group | None,
        root: Path,
        aside: Callable[[str], None],
        hearers: Hearers,
        bucket: Objects | None = None,
    ) -> Together | None:
        """None where this process trains alone, in a store and a bucket that have only known such trainings.

        Waits for the savers of trainings in other numbers. `aside`: called in another thread, with what a person should
        know while training stands still. Raises StoreBusyError where one still trains.
        """
        # No rank makes its own before all have looked: they wait for each other next.
        before = () if group is None else ranks_in(root).get(group.size, ())
        await_writers(group, places_in(root, but=0 if group is None else group.size), hearers.tell)
        if group is None and (directories_in(root, but=1) or marks_in(root) or (bucket and _has_ranks(bucket))):
            group = Group.alone()
        return None if group is None else cls(group, root, aside, hearers, before)

    @property
    def is_first(self) -> bool:
        """Whether it is the one that tells a person what is the same on all."""
        return self.group.rank == 0

    def divide(
        self, training: Training, schedule: Schedule | None, warn: Callable[[str], None], *, in_parts: bool
    ) -> Training:
        """The training with who saves what of all that ranks have alike; every rank calls this.

        `in_parts`: what is learned may have updates made again. Raises InputError for a schedule of another share, or
        of other parameters.
        """
        divides, entries_stay = True, in_parts
        if schedule is not None:
            divides = _is_of_a_share(schedule, training)
            apart = divides and _has_entries_apart(schedule, training)
            if apart and schedule.gradients:
                raise InputError(
                    "schedule: takes gradients along, but not what optimizers keep of the same parameters; compile the "
                    "model with --divided and this policy, or a graph traced with both"
                )
            entries_stay = not any(self.group.gather("attach()", apart))
        # Ranks whose shares are of different sizes would learn to have checkpoints of different numbers of parts.
        evenly = schedule is None and in_parts
        divided = self._divided(training, warn, divides=divides, entries_stay=entries_stay, evenly=evenly)
        if schedule is not None and divides and (missing := _unplanned(schedule, divided)):
            raise InputError(
                f"schedule: has no row for {missing[0]}, which this rank saves: it is of another training, or of "
                "--divided for another --rank, or not all ranks see each other's directories; compile it again"
            )
        return divided

    def _divided(
        self, training: Training, warn: Callable[[str], None], *, divides: bool, entries_stay: bool, evenly: bool
    ) -> Training:
        give_back_gathered(training.models)
        alike = {_says(each): each for each in alike_in(training)} if divides else {}
        sharing = fellows(self.group, self.root, alike)
        contents = {
            says: content_of(alike[says].sizes_bytes, training) for says, ranks in sharing.items() if len(ranks) > 1
        }
        said = gathered(self.group, "attach()", contents)
        for says, content in contents.items():
            if any(said[rank].get(says) != content for rank in sharing[says]):
                warn(
                    f"{next(iter(alike[says].sizes_bytes))}: ranks {', '.join(map(str, sharing[says]))} are replicas "
                    "and do not begin with the same bytes; give each of them the same seed"
                )
                sharing[says] = ()
        shares = [(ranks, alike[says].sizes_bytes) for says, ranks in sharing.items()]
        if evenly:
            alone = ((Division.of(self.group.rank, [share]), share) for share in shares)
            shares = [share for found, share in alone if found is not None and found.is_even(share[1])]
        divided = shared_out(training, self.group.rank, shares, entries_stay=entries_stay)
        # What lies in one storage is saved by one rank, so that another one may be left with nothing after all.
        return divided if all(self.group.gather("attach()", bool(saved_here(divided)))) else training

    def mirror(self, handle: StoreHandle) -> None:
        """See HeldForOthers.start. What counts from now on is where copies of earlier ones were for."""
        self._held.start(handle)
        self.agreement.on_counted = self._held.counted

    def begin(self) -> tuple[Mark, ...]:
        """This rank's store is open: the checkpoints that all ranks have, newest first. A new attempt begins."""
        self._forget_what_is_gone()
        said = self._seeking.own()
        found = common(said.own)
        if found:
            self._note_whole(marks_in(self.store).get(found[0]))
        self._stored = common(said.stored)
        return found

    def _forget_what_is_gone(self) -> None:
        """Its serial will be another checkpoint's, that nobody may have but this rank."""
        noted = noted_whole(self.store)
        newest = next(map(parse_directory_name, checkpoint_names(self.store)), None)
        if noted and noted > (0 if newest is None else newest.serial):
            with contextlib.suppress(OSError):
                note_whole(self.store, 0)

    def put_behind(self, objects: Objects, store: Path, hearers: Hearers, *, start_over: bool) -> BehindRanks:
        """A bucket, in which each rank has its own parts. Raises InputError, StoreError."""
        rank = (self.group.rank, self.group.size)
        behind = BehindRanks(objects, store, hearers, rank, self.root, self.agreement, start_over=start_over)
        self._seeking.behind = behind
        return behind

    def keep_stored(self) -> None:
        """Of what all ranks had in the bucket at begin() the newest is retained for good. Raises StoreError."""
        if self._seeking.behind is not None:
            self._seeking.behind.keep_newest(self._stored)

    def part_of(self, marks: Sequence[Mark]) -> Checkpoint | None:
        """This rank's part of the first of them; None where there is none."""
        return marks_in(self.store)[marks[0]].checkpoint if marks else None

    def load(self, iteration: int | None, training: Training) -> Found | Nothing:
        """The newest checkpoint (of that iteration, if given) of which every part verifies, of however many ranks.

        A new attempt begins. Nothing where there has been no checkpoint that every rank had. Raises, on every rank,
        CorruptStoreError where there has been one and none is whole now, StoreError for an iteration not all have.
        """
        found = self._seeking.newest(iteration, partial(self._read, training))
        if isinstance(found, Nothing):
            return found
        (mark, (files, record), apart), checkpoint, skipped = found
        self._chosen = _content_of(mark, checkpoint)
        is_as_it_was = self._seeking.behind is None and apart is None and iteration is None and self.group.size > 1
        self._to_mirror = mark if is_as_it_was else None
        if apart is not None:
            lines = apart.remarks(self.group.gather("restore()", apart.said()))
            for line in lines if self.is_first else ():
                self._notify(f"{self.root}: {line}")
        return Found(files, record, checkpoint, skipped)

    def _read(
        self, training: Training, mark: Mark, kept: Kept
    ) -> tuple[Mark, tuple[Mapping[str, TensorFile], Record], Apart | None]:
        """What is restored of it; and of another number of ranks what is to be told of each one's own."""
        found = self._seeking.read(mark, kept, training)
        parts = kept.others.get(mark)
        return mark, found, None if parts is None else Apart.of(parts, training, self.group, self.root)

    def foreseen(self) -> Checkpoint | None:
        """This rank's part of what `load` would find; None where that is nothing. Raises as it does."""
        found = self._seeking.newest(None, self._seeking.verified)
        return None if isinstance(found, Nothing) else found[0]

    def iterations(self) -> list[int]:
        """Of what ranks left, sound or not, newest first; this one's own apart."""
        return self._seeking.iterations()

    def all_ask_for(self, iteration: int | None) -> None:
        """Every rank asks for this one, or for the newest. Raises InputError, on each, where another asks otherwise."""
        first, *others = self.group.gather("restore()", iteration)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise InputError(
                    f"restore: rank 0 asks for {_asked(first)}, and rank {rank} for {_asked(other)}; "
                    "give every rank the same iteration, or none"
                )

    def fits(self) -> None:
        """Every rank's part fits its training: they may be changed. Raises PeerError where another's does not, or is of
        another checkpoint."""
        self.group.same("restore()", {"restored checkpoint": self._chosen})
        self._held.restored()

    def lacks_copies(self) -> bool:
        """Whether the newest checkpoint was restored, and some rank's part of it is on one machine alone, though all go
        to mirrors. Every rank calls this once it has restored."""
        return self._to_mirror is not None and self._held.lacks_copies(self.root, self._to_mirror)

    def require_alike(self, training: Training, restored: Restored) -> None:
        """Every rank calls this once it has restored. Raises PeerError, on each, where ranks do not have the same bytes
        of what they have alike, after updates that were made again."""
        alike: dict[tuple[int, ...], list[str]] = {}
        if training.division is not None and restored.replay_seconds is not None:
            for name, ranks in training.division.savers.items():
                alike.setdefault(tuple(sorted(ranks)), []).append(name)
        contents = {
            f"{names[0]} and what else ranks {', '.join(map(str, ranks))} have alike": content_of(names, training)
            for ranks, names in alike.items()
        }
        found: dict[str, object] = {}
        for said in gathered(self.group, "restore()", contents):
            for what, content in said.items():
                if found.setdefault(what, content) != content:
                    raise PeerError(
                        f"restore: {what} are not the same on each once updates were made again; "
                        "restore(iteration=N) an older checkpoint, or give each rank the same device and versions"
                    )

    def _give_back(self, mark: Mark, _serial: int) -> None:
        """It is on every rank's disk."""
        if mark.attempt == self.agreement.attempt:  # of this run: also where it starts over, and restores nothing
            self._held.drop_copies()
        with contextlib.suppress(RuntimeError):  # no thread is to be had; a later run does it
            self._borrowed.give_back(mark.attempt)

    def close(self, completed: int | None = None, left_by: str | None = None) -> None:
        """Agree on nothing more. `completed`: so many iterations, of which this rank has its last checkpoint on disk,
        and waits for a little until all have theirs. Tells where another one has completed another number. `left_by`:
        what ended the training before; the others are told where they wait for this rank."""
        complete = completed is not None and left_by is None
        how = "" if left_by is None else f"after iteration {completed} ({left_by})"
        self.agreement.close(orderly=complete, left=how)
        newest: RankPart | None = None
        with contextlib.suppress(StoreError):  # what it does not see is not noted
            newest = newest_part(self.store) if complete else None
        mark = None if newest is None else newest.mark
        left = [each for each in self.group.leave([completed, mark]) if isinstance(each, list)] if complete else []
        said = [each for _, each in left]
        if self.is_first and len({each for each, _ in left}) > 1:
            self._notify(f"{self.root}: {_uneven([each for each, _ in left])}")
        alike = bool(said) and all(each == (None if mark is None else list(mark)) for each in said)
        if mark is not None and alike:
            self._note_whole(newest)
            self._give_back(mark, 0)
        self._borrowed.close()
        self._held.close(orderly=alike)

    def _note_whole(self, part: RankPart | None) -> None:
        """As its saver does, which may have ended before it heard of it."""
        if part is not None and part.checkpoint.serial > (noted_whole(self.store) or 0):
            with contextlib.suppress(OSError):
                note_whole(self.store, part.checkpoint.serial)

    def _begin_attempt(self, known: Iterable[Iterable[Mark]]) -> None:
        self.member.attempt = self.agreement.attempt = max(next_attempt(known), self.member.attempt + 1)


def _uneven(completed: Sequence[int]) -> str:
    """By rank."""
    first = completed[0]
    rank, other = next((rank, other) for rank, other in enumerate(completed) if other != first)
    return (
        f"rank 0 has ended after {first} iterations, and rank {rank} after {other}: where a step() is left out on a "
        "rank, its parts of later checkpoints are of other moments than the others', and a resumed run will differ; "
        "call step() on every rank after each iteration"
    )


def _asked(iteration: object) -> str:
    return "the newest checkpoint" if iteration is None else f"iteration {iteration}"


def _content_of(mark: Mark, checkpoint: Checkpoint) -> str:
    """Which one it is, the same on all ranks: of one process, whose attempts have no number, by what its files have."""
    if mark.attempt:
        return f"iteration {mark.iteration} of attempt {mark.attempt}"
    return (
        f"iteration {mark.iteration} of {digest_of([[each.name, each.blocks] for each in checkpoint.manifest.files])}"
    )


def _says(alike: Alike) -> str:
    return digest_of([list(alike.ranks), dict(alike.sizes_bytes), dict(alike.shares_with)])


def _has_ranks(bucket: Objects) -> bool:
    """Not where it does not answer: BehindOne asks once more, and refuses ranks."""
    try:
        return has_ranks(bucket.sizes())
    except BucketError:
        return False


def kind_of(schedule: Schedule, training: Training) -> str:
    """What the ranks' schedules have in common, whatever each rank's part is."""
    return f"of {schedule.policy}, for a share" if _is_of_a_share(schedule, training) else f"of {schedule.policy}"


def _is_of_a_share(schedule: Schedule, training: Training) -> bool:
    """Whether it was compiled for what one rank saves: it has some parameters, and leaves some to others."""
    return 0 < len(_unplanned(schedule, training)) < len(_saved_parameters(training))


def _has_entries_apart(schedule: Schedule, training: Training) -> bool:
    """Whether it has what an optimizer keeps of a parameter, and leaves that to another rank."""
    planned = {StateName(view.name) for row in schedule.state for view in row.views}
    names = parameter_names(training)
    by_stem = {stem: names[id(parameter)] for each in entry_stems(training) for stem, parameter in each.items()}
    owners = (owner(name, by_stem) for name in planned if name.is_optimizers)
    return any(parameter is not None and parameter not in planned for parameter in owners)


def _unplanned(schedule: Schedule, training: Training) -> list[str]:
    planned = {view.name for row in schedule.state for view in row.views}
    return [name for name in _saved_parameters(training) if name not in planned]


def _saved_parameters(training: Training) -> list[str]:
    parameters = {name for name, _ in parameters_of(training)}
    return [str(live.name) for live in saved_here(training) if live.name in parameters]
