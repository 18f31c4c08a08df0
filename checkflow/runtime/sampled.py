"""A few bytes of what each update has left, looked at again before the next one: for writes that no counter tells of.

Collectives and `.data` write so. Who averages weights over ranks, or takes other ones in, writes all of them: a few
bytes of a few parameters, in turns, show it in the same iteration. What writes a few elements now and then is for the
proof to find. On a CUDA device nothing waits for the answer: it is taken at a later update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checkflow.runtime.binding import BoundStorage

_TENSORS = 4  # of an optimizer, in an iteration
_BYTES = 256  # of each
_STRIDE = 4099  # between places that are looked at, a prime


@dataclass(frozen=True, slots=True)
class _Sample:
    places: list[torch.Tensor]
    bytes: torch.Tensor  # a copy


class Sampled:
    """Of the parameters that each optimizer, by its number, updates."""

    def __init__(self) -> None:
        self._turn = 0
        self._left: dict[int, _Sample] = {}
        self._coming: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # whether other bytes were found

    def made(self, number: int, storages: Sequence[BoundStorage]) -> None:
        """An update has ended, and nothing else was written since."""
        parameters = [each.data for each in storages if not each.entry and each.data.numel()]
        places: list[torch.Tensor] = []
        for _ in range(min(_TENSORS, len(parameters))):
            self._turn += 1
            data = parameters[self._turn % len(parameters)]
            start = self._turn * _STRIDE % max(1, data.numel() - _BYTES)
            places.append(data[start : start + _BYTES])
        if places and not _is_recorded(places[0]):
            self._left[number] = _Sample(places, torch.cat(places))

    def is_written(self, number: int) -> bool:
        """Whether something has written what that update left, as far as is known by now."""
        sample = self._left.get(number)
        if sample is None or _is_recorded(sample.bytes):
            return False
        now = torch.cat(sample.places)
        if now.device.type == "cpu":
            return not torch.equal(now, sample.bytes)
        here = torch.empty((), dtype=torch.bool, pin_memory=True)
        here.copy_((now != sample.bytes).any(), non_blocking=True)
        self._coming.append((here, torch.cuda.current_stream(now.device).record_event()))
        return self._arrived()

    def forget(self) -> None:
        """What comes next is no update's."""
        self._left.clear()
        self._coming.clear()

    def _arrived(self) -> bool:
        found = False
        while self._coming and self._coming[0][1].query():  # type: ignore[no-untyped-call]
            found |= bool(self._coming.popleft()[0].item())
        return found


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether what is done to it now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
