"""torch.distributed.checkpoint writes to a store: any state_dict, from any number of ranks, by its own planner.

state = {"model": model.state_dict(), "epoch": 3}
dcp.save(state, storage_writer=checkflow.StoreWriter("checkpoints"))
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkflow.distributed.dcp_plans import RankPlan, index_of_all, rank_plan, record_of
from checkflow.distributed.marks import Mark
from checkflow.distributed.parts import newest_mark
from checkflow.errors import InputError
from checkflow.state.host.capture import versions
from checkflow.state.host.record import MemberRecord
from checkflow.store import alone
from checkflow.store.format.manifest import MAX_FILE_BYTES, directory_name
from checkflow.store.format.ranks import directory_of
from checkflow.torch_internals import ranks_here

__all__ = ["StoreWriter"]

_ROOM = 10**6  # attempts that a draw may leave out, so that two jobs which do not see each other's parts share none


@dataclass(frozen=True, slots=True)
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


class StoreWriter(StorageWriter):
    """A StorageWriter to a store: each save is another checkpoint of it, which StoreReader reads. All are kept.

    Args:
        store: the directory, made if there is none.
        iteration: of the first save with this writer, the same on every rank; one more than the newest checkpoint's
            unless given, and so for each save that follows.

    A save is durable when it returns, and counts from then on: each rank writes its part (as `attach` has it, in a
    directory of its own where there are several), and the coordinator's gets its name last. Beside tensors, a
    state_dict may have what JSON can say: numbers, text, bytes, dtypes, small arrays, and plain containers of them.
    Nothing is pickled. Raises InputError that names what cannot be saved, StoreError where the disk refuses,
    StoreBusyError while a training writes to the store; torch hands them on in a CheckpointException.
    """

    def __init__(self, store: str | os.PathLike[str], iteration: int | None = None) -> None:
        super().__init__()
        if iteration is not None and (type(iteration) is not int or not 0 <= iteration <= MAX_FILE_BYTES):
            raise InputError(f"iteration: is {iteration!r:.80}; give how many are completed, 0 or more")
        self._store = Path(store)
        self.save_id: str | None = None  # of the last save, where this is its coordinator: its checkpoint's name
        self._iteration = iteration
        self._is_coordinator = False
        self._before = _Before(0, 0, None)
        self._plans: list[SavePlan] = []  # the last ones of all ranks, for a planner that sends only what has changed
        self._begun: tuple[alone.UnderWay, _Share, RankPlan] | None = None  # the coordinator's, until all have theirs

    @property
    def checkpoint_id(self) -> Path:
        """The store."""
        return self._store

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._store, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another store."""
        if checkpoint_id is not None:
            self._store = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: object, **kwargs: object) -> None:
        if ranks_here() > 1 and kwargs.get("use_collectives") is False:
            raise InputError("use_collectives=False: ranks have to agree on what is one checkpoint; leave it out")
        self._is_coordinator = is_coordinator
        if self._begun is not None:  # of a save that another rank ended
            self._begun[0].end()
            self._begun = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._before = _seen_in(self._store, self._iteration)
        return replace(plan, storage_data=self._before)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """By the coordinator: all ranks' parts get one mark."""
        told = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Before)]
        mark = _next([self._before, *told], len(plans))
        self._plans = [plan if plan.usable else self._last(rank, len(plans)) for rank, plan in enumerate(plans)]
        return [
            replace(plan, storage_data=_Share(rank, len(plans), mark), usable=True)
            for rank, plan in enumerate(self._plans)
        ]

    def _last(self, rank: int, size: int) -> SavePlan:
        """A rank's plan, of which its planner says that it has not changed."""
        if len(self._plans) != size:
            raise InputError(
                "planner: leaves out plans that this StoreWriter has not seen; use one StoreWriter for its saves, or "
                "enable_plan_caching=False"
            )
        return self._plans[rank]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share = plan.storage_data
        assert isinstance(share, _Share)
        mine = rank_plan(plan.items, planner, share.rank)
        begun = alone.begin(share.directory(self._store), mine.files, _tell)
        if self._is_coordinator:
            self._begun = begun, share, mine
        else:
            record = record_of(share.mark.iteration, share.member, mine.values)
            alone.publish(begun, share.mark.iteration, record, versions(), _tell)
            self._iteration = None
        done: Future[list[WriteResult]] = Future()
        done.set_result(mine.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """By the coordinator, once every rank's part is durable."""
        assert self._begun is not None
        (begun, share, mine), self._begun = self._begun, None
        try:
            record = record_of(share.mark.iteration, share.member, mine.values, index_of_all(metadata, results))
        except BaseException:
            begun.end()
            raise
        manifest = alone.publish(begun, share.mark.iteration, record, versions(), _tell)
        self.save_id = directory_name(manifest.serial, manifest.iteration)
        self._iteration = None
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _seen_in(store: Path, asked: int | None) -> _Before:
    """Raises StoreError for what is no store."""
    attempt, iteration = newest_mark(store) or Mark(0, 0)
    return _Before(attempt, iteration, asked)


def _next(before: Sequence[_Before], size: int) -> Mark:
    """Later than all that any rank sees. Raises InputError where ranks were told different iterations."""
    asked = sorted({each.asked for each in before if each.asked is not None})
    if len(asked) > 1:
        raise InputError(f"iteration: is {asked[0]} on one rank and {asked[1]} on another; give every rank the same")
    newest = max(before, key=lambda each: (each.attempt, each.iteration))
    attempt = newest.attempt + 1 + secrets.randbelow(_ROOM) if newest.attempt or size > 1 else 0
    return Mark(attempt, asked[0] if asked else newest.iteration + 1)


def _tell(line: str) -> None:
    warnings.warn(line, stacklevel=2)
