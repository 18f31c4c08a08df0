"""Where the bytes of each move go in a slot: copies made once for a binding, and used by each checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, groupby

import torch

from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.device import Batch, Copy
from checkflow.runtime.sink import NamedSlot
from checkflow.runtime.timetable import Timetable
from checkflow.state.names import StateName

_KEPT_BATCHES = 1000


class SlotMap:
    """The copies of each move to each slot, made once for a binding."""

    def __init__(self, timetable: Timetable, binding: Binding, lane: int = 0) -> None:
        self._timetable = timetable
        self._lane = lane
        self.binding = binding
        self._targets: dict[tuple[int, StateName], torch.Tensor] = {}
        self._moves: dict[tuple[int, int], tuple[Copy, ...]] = {}
        self._batches: dict[tuple[int, tuple[int, ...]], tuple[Batch, tuple[BoundStorage, ...]]] = {}
        self._sources: dict[int, torch.Tensor] = {}
        self._hosted: dict[int, Batch] = {}
        guarded = chain(binding.optimizer_storages, binding.buffer_storages.values())
        # A fused update counts its steps by a foreach function, too; all else that it writes has one guard.
        functions = Counter(StateName(subject).holder for kind, subject in timetable.anchors if kind == "update")
        inside = max(functions.values(), default=0) > 1
        self._guards = {
            storage.id: (guard, storage.entry if inside else "")
            for guard, storages in enumerate(guarded)
            for storage in storages
        }

    @cached_property
    def lacking(self) -> frozenset[BoundStorage]:
        """Written state of which moves leave out bytes that these slots have: no schedule that is attached says so."""
        found = (s for s in self.binding.storages.values() if s.written and not self._covers(s))
        return frozenset(s for s in found if any(self._has(segment.target) for segment in s.segments))

    def _covers(self, storage: BoundStorage) -> bool:
        moves = [self._timetable.moves[index] for index in self._timetable.moves_of.get(storage.id, ())]
        end = 0
        for start, size_bytes in sorted((move.offset_bytes, move.size_bytes) for move in moves):
            if start > end:
                return False
            end = max(end, start + size_bytes)
        return end >= storage.data.numel()

    def batches(self, indices: Iterable[int]) -> Iterator[list[int]]:
        """Moves in order, apart where something else waits for them, unless they are few bytes.

        What has no storage here, absent or on the host, has no copies and stands between no others.
        """
        indices, moves = tuple(indices), self._timetable.moves
        bound = [index for index in indices if moves[index].gradient or moves[index].storage in self.binding.storages]
        batch = [] if len(bound) == len(indices) else sorted(set(indices).difference(bound))
        for _, group in groupby(bound, key=self._awaited_by):
            more = list(group)
            total_bytes = sum(self._timetable.moves[index].size_bytes for index in batch + more)
            if batch and total_bytes > self._timetable.few_bytes:
                yield batch
                batch = []
            batch += more
        yield batch

    def _awaited_by(self, index: int) -> tuple[int | None, tuple[int, str] | None]:
        """What waits for a move: the release of its snapshot, or the guard of the tensor that it reads.

        Inside an update that is followed each kind of state has its own.
        """
        move = self._timetable.moves[index]
        return move.release, None if move.snapshot else self._guards.get(move.storage)

    def of_move(self, slot: NamedSlot, index: int) -> tuple[Copy, ...]:
        """The copies of a direct move. A storage that is absent has none."""
        key = slot.index, index
        if key not in self._moves:
            move = self._timetable.moves[index]
            storage = self.binding.storages.get(move.storage)
            span = move.offset_bytes, move.offset_bytes + move.size_bytes
            self._moves[key] = () if storage is None else self.of_storage(slot, storage, span)
        return self._moves[key]

    def of_moves(self, slot: NamedSlot, indices: tuple[int, ...]) -> tuple[Batch, tuple[BoundStorage, ...]]:
        """The copies of direct moves that leave together, and what they read."""
        key = slot.index, indices
        if key not in self._batches:
            if len(self._batches) > _KEPT_BATCHES:  # hooks that fire differently in each iteration
                self._batches.clear()
            read = (self.binding.storages.get(self._timetable.moves[index].storage) for index in indices)
            copies = Batch(copy for index in indices for copy in self.of_move(slot, index))
            self._batches[key] = copies, tuple(dict.fromkeys(storage for storage in read if storage is not None))
        return self._batches[key]

    def hosted(self, slot: NamedSlot) -> Batch:
        """The copies of state that is in host memory beside a CUDA training."""
        if slot.index not in self._hosted:
            self._hosted[slot.index] = Batch(c for s in self.binding.hosted for c in self.of_storage(slot, s))
        return self._hosted[slot.index]

    def source(self, index: int) -> torch.Tensor:
        """The live bytes of a move whose storage is not absent."""
        if index not in self._sources:
            move = self._timetable.moves[index]
            data = self.binding.storages[move.storage].data
            self._sources[index] = data[move.offset_bytes : move.offset_bytes + move.size_bytes]
        return self._sources[index]

    def of_storage(
        self, slot: NamedSlot, storage: BoundStorage, span: tuple[int, int] | None = None
    ) -> tuple[Copy, ...]:
        """The copies of a storage's bytes from span[0] to span[1]."""
        start, end = span or (0, storage.data.numel())
        copies: list[Copy] = []
        for segment in storage.segments:
            if not self._has(segment.target):
                continue
            low = max(start, segment.start_bytes)
            high = min(end, segment.start_bytes + segment.size_bytes)
            if low < high:
                target = self._target(slot, segment.target)
                into = target[low - segment.start_bytes : high - segment.start_bytes]
                copies.append(Copy(into, storage.data[low:high]))
        return tuple(copies)

    def of_gradient(self, slot: NamedSlot, index: int, pieces: Iterable[torch.Tensor]) -> Iterator[Copy]:
        """The copies of a move's bytes of a gradient, which are in pieces, end to end."""
        move = self._timetable.moves[index]
        assert move.gradient is not None
        return self.end_to_end(slot, move.gradient, move.offset_bytes, pieces)

    def end_to_end(self, slot: NamedSlot, name: StateName, at: int, pieces: Iterable[torch.Tensor]) -> Iterator[Copy]:
        """The copies of pieces to a slot's bytes of a tensor, from one of these on."""
        target = self._target(slot, name)
        for piece in pieces:
            yield Copy(target[at : at + piece.numel()], piece)
            at += piece.numel()

    def copy_loose(self, slot: NamedSlot) -> None:
        """What does not lie in memory as the slot has it, element by element; returns when it is there."""
        for live in self.binding.loose:
            if self.binding.targets[live.name].alias_of is None and self._has(live.name):
                self.copy_now(slot, live.name, live.tensor)

    def copy_now(self, slot: NamedSlot, name: StateName, tensor: torch.Tensor) -> None:
        """A tensor of this name, element by element; returns when it is there."""
        if tensor.numel():
            into = self._target(slot, name).view(tensor.dtype)
            with torch.no_grad():
                ordered = tensor.permute(self.binding.targets[name].order)
                into.view(ordered.shape).copy_(ordered)

    def _has(self, name: StateName) -> bool:
        """Whether slots of this lane have a tensor."""
        return self.binding.lanes.get(name, self._lane) == self._lane

    def _target(self, slot: NamedSlot, name: StateName) -> torch.Tensor:
        key = slot.index, name
        if key not in self._targets:
            with torch.inference_mode(mode=False):  # what is made in it can be written in it alone
                self._targets[key] = torch.frombuffer(slot.view(name), dtype=torch.uint8)
        return self._targets[key]
