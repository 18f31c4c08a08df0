"""The bucket behind the store of a training in several processes: one more place where parts of a checkpoint are.

Each rank's part lies below the name of its directory, so that a copy of the bucket is a store. Only what every rank's
part is there of counts; where it is newer than what can be read from disks, each rank downloads its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkflow.checkpointing.behind import Behind
from checkflow.checkpointing.borrowed import Borrowed
from checkflow.checkpointing.turns import Turns
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.agreement import Agreement
from checkflow.distributed.marks import Dated, Mark
from checkflow.distributed.parts import all_in, marks_in
from checkflow.distributed.stored import mark_of
from checkflow.errors import CorruptStoreError, StoreError
from checkflow.store.both.config import BucketConfig
from checkflow.store.bucket.names import BucketContents, by_rank, iteration_of, read_manifest
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.ranks import directory_of
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle

Rank = tuple[int, int]
"""A rank's number, and that of all of its training."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What a rank has seen in the bucket: names by mark, of its own parts and of others' in other numbers.

    `is_known`: it answered. `written`: see marks.newest_first.
    """

    parts: Mapping[Rank, Mapping[Mark, str]]
    is_known: bool
    written: Mapping[Mark, Dated] = field(default_factory=dict)


class BehindRanks(Behind):
    """See the module. `rank`: this one; `root`: the directory of all of them; `agreement`: theirs."""

    def __init__(
        self,
        objects: Objects,
        store: Path,
        hearers: Hearers,
        rank: Rank,
        root: Path,
        agreement: Agreement,
        *,
        start_over: bool,
    ) -> None:
        """Ask it. Raises InputError where it refuses, StoreError where it is out and nobody can know what is to be
        resumed."""
        super().__init__(objects, store, hearers)
        self._rank = rank
        self._root = root
        self._turns: Turns | None = None
        self._agreement = agreement
        self._borrowed = Borrowed(root, store)
        self._records: dict[tuple[Rank, str], Mark | None] = {}  # of parts that were looked at
        self._written: dict[Mark, Dated] = {}  # of those of one process
        self._look(may_be_out=not start_over)
        names = {name for contents in self._contents.values() for name in contents.checkpoints}
        self.iterations = sorted({iteration_of(name) for name in names}, reverse=True)

    def start(self, handle: StoreHandle, slots: int, retention: Retention, retry_s: float) -> None:
        """What every rank has verified from now on is uploaded. Raises StoreError where no process can be started,
        InputError."""
        own = self._objects_of(self._rank)
        own.make()
        one_more = replace(retention, last=retention.last + 1)  # a part may be there of what not all have
        config = BucketConfig(self._store, own.url, one_more, retry_s, in_doubt=slots, whole_url=self.url)
        self._process = handle.start_uploader(config)
        self._turns = Turns(self._agreement, self._process, lambda line: self._hearers.notify(f"{self.url}: {line}"))

    def poll(self) -> None:
        """See Behind."""
        super().poll()
        if self._turns is not None:
            self._turns.poll()
            self._borrowed.give_back(self._turns.verified_attempt)

    def close(self, deadline_s: float) -> None:
        """See Behind."""
        super().close(deadline_s)
        if self._turns is not None:
            self._borrowed.give_back(self._turns.verified_attempt)
        self._borrowed.close()

    def keep(self, iteration: int) -> None:
        """The newest checkpoint, of this iteration, was marked as retained for good, on every rank."""
        if self._turns is not None:
            self._turns.keep(iteration)

    def look(self) -> None:
        """Ask it what there is now. Raises InputError, StoreError."""
        self._borrowed.close()  # what is still being removed is seen as gone
        self._brought.clear()
        self._look(may_be_out=True)

    def _look(self, *, may_be_out: bool) -> None:
        sizes = self._asked(may_be_out=may_be_out)
        self._is_known = sizes is not None
        self._contents = {} if sizes is None else by_rank(sizes)

    @property
    def had_one(self) -> bool:
        """Whether every rank once had its part of a checkpoint there, as far as is known."""
        return not self._is_known or any(
            contents.was_whole or (rank == (0, 1) and contents.checkpoints) for rank, contents in self._contents.items()
        )

    def stock(self) -> Stock:
        """What there was when it was asked: this rank's parts, and of other numbers of ranks those parts that this rank
        reads for all. Raises StoreError."""
        rank, size = self._rank
        ranks = [each for each in self._contents if each == self._rank or (each[1] != size and each[0] % size == rank)]
        return Stock({each: self._marks_of(each) for each in ranks}, self._is_known, self._written)

    def fetch(self, mark: Mark, rank: Rank | None = None) -> str:
        """Download a rank's part, this one's own unless given, into its directory; another one's is there until every
        rank has one of its own. Returns what is wrong with it, if anything. Raises StoreError where it cannot be had
        now."""
        rank = self._rank if rank is None else rank
        name = self._marks_of(rank).get(mark)
        if name is None:
            return f"{self._objects_of(rank).url} has none"
        try:
            store = self._store if rank == self._rank else self._directory_of(rank)
            store.mkdir(parents=True, exist_ok=True)
            self._bring(self._objects_of(rank), name, self._contents[rank], store)
            if rank != self._rank:
                self._borrowed.add(self._brought[-1], self._agreement.attempt)
        except CorruptStoreError as error:
            return f"{self._objects_of(rank).url}: {name}: {error}"
        return ""

    def lacks(self, mark: Mark, ranks: Iterable[Rank]) -> list[Rank]:
        """Those whose parts are not to be seen on this rank's disks."""
        return [rank for rank in ranks if not self._sees(mark, rank)]

    def _sees(self, mark: Mark, rank: Rank) -> bool:
        if rank[1] == 1:  # whose records need not say whose part they are
            return any(found.mark == mark for found in all_in(self._root) if found.size == 1)
        return mark in marks_in(self._directory_of(rank))

    def keep_newest(self, marks: Iterable[Mark]) -> None:
        """Retain this rank's part of the first of them that is whole here. Raises StoreError."""
        found = self._marks_of(self._rank)
        for name in (found[mark] for mark in marks if mark in found):
            with contextlib.suppress(CorruptStoreError):
                self._keep(self._objects_of(self._rank), name, self._contents[self._rank])
                return

    def _directory_of(self, rank: Rank) -> Path:
        return self._root if rank[1] == 1 else self._root / directory_of(*rank)

    def _objects_of(self, rank: Rank) -> Objects:
        return self._objects if rank[1] == 1 else self._objects.below(directory_of(*rank))

    def _marks_of(self, rank: Rank) -> dict[Mark, str]:
        found: dict[Mark, str] = {}
        if (contents := self._contents.get(rank)) is None:
            return found
        for name in contents.newest_first:
            if (rank, name) not in self._records:
                self._records[rank, name] = self._mark_of(rank, name, contents)
            if (mark := self._records[rank, name]) is not None:
                found.setdefault(mark, name)
        return found

    def _mark_of(self, rank: Rank, name: str, contents: BucketContents) -> Mark | None:
        objects = self._objects_of(rank)
        try:
            manifest = read_manifest(objects, name, contents.checkpoints[name])
            mark = mark_of(objects, name, manifest, processes=rank[1])
            if not mark.attempt:
                written = Dated(manifest.created, is_on_disk=False, serial=manifest.serial)
                self._written[mark] = max(written, self._written.get(mark, written))
            return mark
        except CorruptStoreError as error:
            self._hearers.notify(f"{objects.url}: skipped {name}: {error}")
            return None
        except BucketError as error:
            raise StoreError(f"{objects.url}: {name} cannot be read ({error}); try again") from None
