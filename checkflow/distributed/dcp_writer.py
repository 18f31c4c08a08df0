"""torch.distributed.checkpoint writes to a store: any state_dict, from any number of ranks, by its own planner.

state = {"model": model.state_dict(), "epoch": 3}
dcp.save(state, storage_writer=checkflow.StoreWriter("checkpoints"))
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkflow.distributed.dcp_plans import RankPlan, check_restored, index_of_all, rank_plan, record_of, restored
from checkflow.distributed.marks import Mark, check_iteration
from checkflow.distributed.parts import newest_mark
from checkflow.errors import InputError
from checkflow.state.host.capture import versions
from checkflow.state.host.record import MemberRecord
from checkflow.store import alone
from checkflow.store.format.manifest import directory_name
from checkflow.store.format.ranks import directory_of
from checkflow.torch_ranks import kind_of, ranks_here
from checkflow.workdir import absolute_path

__all__ = ["StoreWriter"]

_ROOM = 10**6  # attempts that a draw may leave out, so that two jobs which do not see each other's parts share none


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Before:
    """What a rank saw in the store before a save: the highest attempt, the newest iteration; and what it was told."""

    attempt: int
    iteration: int
    asked: int | None


@dataclass(frozen=True, slots=True)
class _Share:
    """Which part of a checkpoint a rank writes."""

    rank: int
    size: int
    mark: Mark

    def directory(self, store: Path) -> Path:
        return store if self.size == 1 else store / directory_of(self.rank, self.size)

    @property
    def member(self) -> MemberRecord | None:
        if not self.mark.attempt:
            return None
        return MemberRecord(rank=self.rank, size=self.size, attempt=self.mark.attempt)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Save:
    """What a save has come to on this rank. Torch takes all of a save's steps in one thread, and tells nobody its end
    where another rank fails: it is over once its thread is, or is in another."""

    writer: str
    store: Path
    is_coordinator: bool
    before: _Before = field(default_factory=lambda: _Before(0, 0, None))
    mark: Mark | None = None
    restored: list[SavePlan | None] = field(default_factory=list)  # by rank; None of those that sent theirs
    begun: tuple[alone.UnderWay, _Share, RankPlan] | None = None  # the coordinator's, until all have theirs

    def end(self) -> None:
        _UNDER_WAY.discard(self)
        if self.begun is not None:
            self.begun[0].end()
            self.begun = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What fails inside ends it."""
        try:
            yield
        except BaseException:
            self.end()
            raise


_HERE = threading.local()  # .save: the last one of this thread
_UNDER_WAY: weakref.WeakSet[_Save] = weakref.WeakSet()  # of all threads
_MARKING = threading.Lock()
_HEARD: weakref.WeakSet[_Before] = weakref.WeakSet()  # by this coordinator: planners that cache send some again
_KINDS: dict[Path, str] = {}  # of the planner of each store's last save
_TOLD: set[str] = set()  # the writers whose first iteration has been saved, wherever they are unpickled


class StoreWriter(StorageWriter):
    """A StorageWriter to a store: each save is another checkpoint of it, which StoreReader reads.

    It removes none; a training that attaches to the store later removes those that its retention does not hold.

    Args:
        store: the directory, made if there is none.
        iteration: of the first save with this writer, the same on every rank; one more than the newest checkpoint's
            unless given, and so for each save that follows.

    A save is durable when it returns, and counts from then on: each rank writes its part (as `attach` has it, in a
    directory of its own where there are several), and the coordinator's gets its name last. Beside tensors, a
    state_dict may have what JSON can say: numbers, text, bytes, dtypes, small arrays, and plain containers of them.
    Nothing is pickled. Saves that overlap, as those of `async_save` may, are a checkpoint each.

    Raises InputError that names what cannot be saved, StoreError where the disk refuses, StoreBusyError while a
    training writes to the store; torch hands them on in a CheckpointException.
    """

    def __init__(self, store: str | os.PathLike[str], iteration: int | None = None) -> None:
        super().__init__()
        check_iteration(iteration)
        self._store = absolute_path("store", store, "a directory")
        self.save_id: str | None = None  # of the last save, where this is its coordinator: its checkpoint's name
        self._iteration = iteration
        self._id = uuid4().hex  # the same where it is unpickled, as for each async_save in a process of its own

    @property
    def checkpoint_id(self) -> Path:
        """The store."""
        return self._store

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._store, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another store."""
        if checkpoint_id is not None:
            self._store = absolute_path("checkpoint_id", checkpoint_id, "a directory")

    def set_up_storage_writer(self, is_coordinator: bool, *_args: object, **kwargs: object) -> None:
        if ranks_here() > 1 and kwargs.get("use_collectives") is False:
            raise InputError("use_collectives=False: ranks have to agree on what is one checkpoint; leave it out")
        before: _Save | None = getattr(_HERE, "save", None)
        if before is not None:  # another rank ended it, of this writer or of another
            before.end()
        _HERE.save = _Save(self._id, self._store, is_coordinator)
        _UNDER_WAY.add(_HERE.save)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        save = self._save()
        save.before = _seen_in(save.store, None if self._id in _TOLD else self._iteration)
        return replace(plan, storage_data=save.before)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """By the coordinator: all ranks' parts get one mark."""
        save = self._save()
        told = {plan.storage_data for plan in plans if isinstance(plan.storage_data, _Before)} | {save.before}
        with _MARKING:
            save.mark = mark = _next([each for each in told if each not in _HEARD], _marks_beside(save), len(plans))
        _HEARD.update(told)
        save.restored = restored(plans, _KINDS.get(save.store))
        whole = [plan or sent for plan, sent in zip(save.restored, plans, strict=True)]
        return [
            replace(plan, storage_data=_Share(rank, len(plans), mark), usable=True) for rank, plan in enumerate(whole)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save, share = self._save(), plan.storage_data
        assert isinstance(share, _Share)
        _KINDS[save.store] = kind_of(planner)
        with save.step():
            check_restored(save.restored, planner)
            mine = rank_plan(plan.items, planner, share.rank)
            under_way = alone.begin(share.directory(save.store), mine.files, _tell)
            if save.is_coordinator:
                save.begun = under_way, share, mine
            else:
                record = record_of(share.mark.iteration, share.member, mine.values)
                alone.publish(under_way, share.mark.iteration, record, versions(), _tell)
                self._saved(save)
        done: Future[list[WriteResult]] = Future()
        done.set_result(mine.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """By the coordinator, once every rank's part is durable."""
        save = self._save()
        assert save.begun is not None
        under_way, share, mine = save.begun
        with save.step():
            record = record_of(share.mark.iteration, share.member, mine.values, index_of_all(metadata, results))
            manifest = alone.publish(under_way, share.mark.iteration, record, versions(), _tell)
        self._saved(save)
        self.save_id = directory_name(manifest.serial, manifest.iteration)
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        metadata.storage_meta = StorageMeta(checkpoint_id=save.store, save_id=self.save_id)

    def _save(self) -> _Save:
        """The one that this thread is in."""
        save: _Save = _HERE.save
        assert save.writer == self._id
        return save

    def _saved(self, save: _Save) -> None:
        if self._iteration is not None:
            _TOLD.add(self._id)
        save.end()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _seen_in(store: Path, asked: int | None) -> _Before:
    """Raises StoreError for what is no store."""
    attempt, iteration = newest_mark(store) or Mark(0, 0)
    return _Before(attempt, iteration, asked)


def _marks_beside(save: _Save) -> list[Mark]:
    """Of saves to the same store that other threads are in."""
    beside = [each.mark for each in tuple(_UNDER_WAY) if each is not save and each.store == save.store]
    return [mark for mark in beside if mark is not None]


def _next(before: Sequence[_Before], beside: Sequence[Mark], size: int) -> Mark:
    """Later than all that any rank sees, or is being saved. Raises InputError where ranks were told different
    iterations."""
    asked = sorted({each.asked for each in before if each.asked is not None})
    if len(asked) > 1:
        raise InputError(f"iteration: is {asked[0]} on one rank and {asked[1]} on another; give every rank the same")
    newest = max([*beside, *(Mark(each.attempt, each.iteration) for each in before)])
    attempt = newest.attempt + 1 + secrets.randbelow(_ROOM) if newest.attempt or size > 1 else 0
    is_asked = asked and asked[0] not in {mark.iteration for mark in beside}
    return Mark(attempt, asked[0] if is_asked else newest.iteration + 1)


def _tell(line: str) -> None:
    warnings.warn(line, stacklevel=2)
