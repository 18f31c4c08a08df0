"""What an operator takes of CUDA's memory for itself: it allocates it, and frees it again before it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


class ScratchMeter:
    """The most that was asked of CUDA's allocator at once within an operator, beyond what is there around it.

    Exact where `anew` has the peak statistics begin anew with each operator, which whoever else reads them notices.
    Where they go on it is never less: all that was asked for and freed again, but no more than fills memory to the most
    that this process ever asked for.
    """

    def __init__(self, *, anew: bool) -> None:
        self._anew = anew
        self._before: Mapping[str, int] = {}

    def start(self) -> None:
        """The operator is about to be called."""
        if self._anew:
            torch.cuda.reset_peak_memory_stats()
        self._before = _requested_bytes()

    def stop(self) -> Callable[[], int]:
        """It was called."""
        before, now = self._before, _requested_bytes()
        stayed = max(0, now["current"] - before["current"])
        freed = now["allocated"] - before["allocated"] - stayed
        room = now["peak"] - max(before["current"], now["current"])
        most_bytes = min(freed, room)
        return lambda: most_bytes


def _requested_bytes() -> Mapping[str, int]:
    """Without what the allocator rounds up. Another than torch's own counts nothing, or only part of it."""
    try:
        stats = torch.cuda.memory_stats_as_nested_dict()
    except RuntimeError:
        stats = {}
    found: Mapping[str, int] = stats.get("requested_bytes", {}).get("all", _UNKNOWN)
    return found


_UNKNOWN = {"current": 0, "peak": 0, "allocated": 0}
