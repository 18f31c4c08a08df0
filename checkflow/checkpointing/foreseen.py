"""What a restore will find, for who has to know it before there is a training to attach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkflow.checkpointing.together import Together
from checkflow.store.both.lock import StoreLock
from checkflow.store.format.reader import Checkpoint, newest


def foreseen(store: Path, peers_deadline_s: float, notify: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, of several ranks one that does on each and this one's part of it.

    None where there has been none. Of a training in several processes each calls it. Waits for a saver whose trainer
    was killed: it may still be writing what is the newest. Raises as `Checkpointer.restore` does.
    """
    together = Together.here(store, peers_deadline_s, notify)
    if together is None:
        return newest(store).checkpoint if _is_free(store, notify) else None
    with together.group.telling():
        _is_free(together.store, notify)
        return together.foreseen()


def _is_free(store: Path, notify: Callable[[str], None]) -> bool:
    """Whether it exists; nobody writes to it any more then."""
    if store.exists():
        StoreLock.acquire(store, notify).close()
        return True
    return False
