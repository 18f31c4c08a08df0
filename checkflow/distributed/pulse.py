"""Where training stands still, which ranks say nothing any more: each says in the background that it is there.

A rank that is lost, stopped or killed is named so while the others wait for it in a collective, where no exception
reaches anybody before torch.distributed's own timeout. One that runs and hangs there itself goes on saying so. One that
has closed has nothing more to say: it says that last, and one that leaves before the end with what.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from checkflow.distributed.group import Group, reached

SILENT_S = 60.0  # that training stands still before it is told
BEATS = 12  # in that time
_NAMED = 10  # ranks
_CLOSED = "closed"
_LEFT = "left "  # and how


class Pulse:
    """Of one rank; `tell` is called in the thread that calls `beat`."""

    def __init__(self, group: Group, tell: Callable[[str], None]) -> None:
        self._group = group
        self._tell = tell
        self._silent_s = min(SILENT_S, group.deadline_s / 2)
        self.pause_s = self._silent_s / BEATS
        self._moved_s = time.monotonic()
        self._next_s = 0.0
        self._count = 0
        self._told = False
        self._heard: dict[int, tuple[str, float]] = {}  # by rank: what it said last, and since when

    def moves(self) -> None:
        """Training went on."""
        self._moved_s, self._told = time.monotonic(), False
        self._heard.clear()

    def ends(self, left: str = "") -> None:
        """This rank closes as it should, or has `left` the others so. Raises PeerError where the ranks' store is
        gone."""
        with reached():
            self._group.more.set(f"pulse/{self._group.rank}", f"{_LEFT}{left}" if left else _CLOSED)

    def beat(self) -> None:
        """To be called again and again; does nothing most times. Raises PeerError where the ranks' store is gone."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + self.pause_s
        self._count += 1
        with reached():
            self._group.more.set(f"pulse/{self._group.rank}", str(self._count))
        if self._told or now - self._moved_s < self._silent_s / 2:
            return
        self._hear(now)
        if now - self._moved_s >= self._silent_s and (who := self._who_is_missing(now)):
            self._told = True
            self._tell(
                f"no iteration has ended for {now - self._moved_s:.0f} s, and {who}; torch.distributed's timeout will "
                "end the others"
            )

    def _who_is_missing(self, now: float) -> str:
        """Who has left comes first: the others wait for it, and may be silent since they gave up."""
        for rank, (said, _) in self._heard.items():
            if said.startswith(_LEFT):
                return f"rank {rank} has left {said.removeprefix(_LEFT)}: see what it says"
        silent = [
            str(rank)
            for rank, (said, since) in self._heard.items()
            if said != _CLOSED and now - since > self._silent_s / 4
        ]
        if not silent:
            return ""
        who = f"ranks {', '.join(silent[:_NAMED])} say" if len(silent) > 1 else f"rank {silent[0]} says"
        return f"{who} nothing any more: see whether the process and its machine run"

    def _hear(self, now: float) -> None:
        values = self._group.more
        for rank in range(self._group.size):
            with reached():
                key = f"pulse/{rank}"
                said = values.get(key).decode() if values.check([key]) else ""
            if self._heard.get(rank, (None, 0.0))[0] != said:
                self._heard[rank] = (said, now)
