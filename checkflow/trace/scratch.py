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

    def __init__(self, *, anew: bool, device: torch.device | None = None) -> None:
        """`device`: PyTorch's current one unless given."""
        self._anew = anew
        self._device = device
        self._before: Mapping[str, int] = {}

    def start(self) -> None:
        """The operator is about to be called."""
        if self._anew:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._before = _requested_bytes(self._device)

    def stop(self) -> Callable[[], int]:
        """It was called."""
        before, now = self._before, _requested_bytes(self._device)
        stayed = max(0, now["current"] - before["current"])
        freed = now["allocated"] - before["allocated"] - stayed
        room = now["peak"] - max(before["current"], now["current"])
        most_bytes = max(0, min(freed, room))  # who begins statistics anew meanwhile makes it less
        return lambda: most_bytes


def _requested_bytes(device: torch.device | None) -> Mapping[str, int]:
    """Without what the allocator rounds up. Another than torch's own counts nothing, or only part of it."""
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device)
    except RuntimeError:
        stats = {}
    found: Mapping[str, int] = stats.get("requested_bytes", {}).get("all", _UNKNOWN)
    return found


_UNKNOWN = {"current": 0, "peak": 0, "allocated": 0}
