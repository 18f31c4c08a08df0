"""A few bytes of what each update has left, and of the gradients that it consumed: for writes that no counter tells of.

Collectives and `.data` write so. What an update has left is looked at again before the next one. Who averages weights
over ranks, or takes other ones in, writes all of them: a few bytes of a few parameters, in turns, show it in the same
iteration. What writes a few elements now and then is for the proof to find. On a CUDA device nothing waits for the
answer: it is taken at a later update.

Of gradients, and of factors, a few elements of each are compared with what has arrived in the slot, before it is
staged: who scales or zeroes one writes all of it. A gradient that is to be the product of its factors has to be at its
update what it was when it was made.
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
_WORDS = 64  # of a gradient
_WORD = torch.int32


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


def few_of(data: torch.Tensor, turn: int) -> torch.Tensor:
    """A few words of flat bytes, evenly spread, others in each turn; where these are few, each. The same ones wherever
    the bytes lie; a view of them, unless they lie where no word may.

    The stride is odd, so that they do not lie in one column of a matrix, which may be zero.
    """
    words = data.numel() // _WORD.itemsize
    if not words:
        return data.to(_WORD)
    stride = max(1, words // _WORDS)
    stride -= 1 - stride % 2
    count = min(words, _WORDS) if stride > 1 else min(words, 2 * _WORDS)
    start = turn * _STRIDE % (words - (count - 1) * stride)
    at = data.storage_offset() + start * _WORD.itemsize
    if at % _WORD.itemsize:
        spread = data.as_strided((count, _WORD.itemsize), (stride * _WORD.itemsize, 1), at)
        return spread.clone(memory_format=torch.contiguous_format).reshape(-1).view(_WORD)
    whole = data[: words * _WORD.itemsize].view(_WORD)
    return whole.as_strided((count,), (stride,), at // _WORD.itemsize)


@dataclass(frozen=True, slots=True)
class TakenGradient:
    """A gradient that an update consumes, and that leaves from memory that something may write meanwhile."""

    name: str
    few: torch.Tensor  # of what leaves: of the gradient, or of its factors
    arrives: Sequence[torch.Tensor]  # where that is then, in the slot
    made: torch.Tensor | None = None  # of a gradient whose factors leave: few when it was made
    consumed: torch.Tensor | None = None  # likewise, when the update consumes it


class Glance:
    """At what one update consumes. A CUDA device is not waited for, unless it has to be said."""

    def __init__(self, parts: Sequence[TakenGradient], turn: int) -> None:
        self._turn = turn
        self._names = [part.name for part in parts if part.made is not None]
        self._arrives = [each for part in parts for each in part.arrives]
        both = [each for part in parts for each in (part.made, part.consumed) if each is not None]
        few = [part.few for part in parts]
        self._sizes = [*(each.numel() for each in both), sum(each.numel() for each in few)]
        together = torch.cat([*both, *few])  # a copy
        self._event: torch.cuda.Event | None = None
        self._here = together
        if together.is_cuda:
            self._here = torch.empty_like(together, device="cpu", pin_memory=True)
            self._here.copy_(together, non_blocking=True)
            self._event = torch.cuda.current_stream(together.device).record_event()

    @property
    def is_here(self) -> bool:
        """Whether it can be said at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def no_product(self) -> str:
        """The name of a gradient that was written between its being made and its update; "" where there is none."""
        *both, _ = self._read()
        pairs = zip(self._names, both[::2], both[1::2], strict=True)
        return next((name for name, made, consumed in pairs if not torch.equal(made, consumed)), "")

    def has_arrived(self) -> bool:
        """Whether the slot has what the update consumed. All copies have ended."""
        *_, few = self._read()
        return torch.equal(few, torch.cat([few_of(each, self._turn) for each in self._arrives]))

    def _read(self) -> tuple[torch.Tensor, ...]:
        if self._event is not None:
            self._event.synchronize()
        return torch.split(self._here, self._sizes)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether what is done to it now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
