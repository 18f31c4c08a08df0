"""What a restore will find, for who has to know it before there is a training to attach."""

from __future__ import annotations

import contextlib
from pathlib import Path

from checkflow.checkpointing.behind import bucket_behind
from checkflow.checkpointing.behind_one import BehindOne
from checkflow.checkpointing.together import Together
from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.group import Group
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.reader import Checkpoint, newest
from checkflow.workdir import absolute


def foreseen(store: Path, peers_deadline_s: float, hearers: Hearers, bucket: str | None = None) -> Checkpoint | None:
    """The newest checkpoint that verifies, of several ranks one that does on each and this one's part of it.

    What is newer in the bucket behind the store is on disk then. None where there has been none. Of a training in
    several processes each calls it. Waits for a saver whose trainer was killed: it may still be writing what is the
    newest. Raises as `Checkpointer.restore` does.
    """
    group = Group.here(peers_deadline_s)
    with contextlib.nullcontext() if group is None else group.telling(for_good=True):
        objects = bucket_behind(absolute(store, "store"), bucket)
        together = Together.of(group, store, hearers.tell, hearers, objects)
        if together is None:
            is_there = _is_free(store, hearers)
            if objects is not None:
                store.mkdir(parents=True, exist_ok=True)
                behind = BehindOne(objects, store, hearers, start_over=False)
                is_there = behind.bring(None, behind.newest_here(None)) or is_there
            return newest(store).checkpoint if is_there else None
        _is_free(together.store, hearers)
        if objects is not None:
            together.store.mkdir(parents=True, exist_ok=True)
            together.put_behind(objects, together.store, hearers, start_over=False)
        return together.foreseen()


def _is_free(store: Path, hearers: Hearers) -> bool:
    """Whether it exists; nobody writes to it any more then."""
    if store.exists():
        StoreLock.acquire(store, hearers.notify, tell=hearers.tell).close()
        return True
    return False
