"""One iteration on: what a whole slot has and a delta's gradients make the state of the next iteration.

The whole slot is copied to another one, and there, in place, the updates are made again that the delta's record tells
of, by the optimizer's own class and with as many threads. So whenever this ends, one of the two is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from checkflow.errors import InputError, StoreError
from checkflow.state.host.record import Record, parse_record
from checkflow.state.memory import as_bytes
from checkflow.state.names import StateName, file_of
from checkflow.state.restore.files import DTYPES, FileTensor, TensorFile
from checkflow.state.restore.rebuild import record_of_whole, updated
from checkflow.store.both.config import SaverConfig
from checkflow.store.format.layout import Layout, PlacedTensor
from checkflow.store.memory.replica_slots import DELTA, WHOLE, Step, digest, only_in_whole
from checkflow.store.memory.shared_memory import SharedMemory


class Replica:
    """Of the slots in a trainer's memory."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._layouts = tuple(map(Layout.of, SaverConfig.parse(shared.config).lanes))

    def advance(self, step: Step) -> tuple[int, bytes]:
        """Fill the step's slot, and return its iteration and record.

        Raises StoreError where memory does not hold what was staged or the result is not what training has; InputError,
        FormatError where the updates cannot be made here.
        """
        base, delta = self._shared.record(step.base), self._shared.record(step.delta)
        if base is None or delta is None or delta[0] != base[0] + 1:
            raise StoreError("a slot does not hold what was staged, or is of another iteration")
        iteration, text = delta
        record = parse_record(text)
        self._copy(step)
        into = self._shared.slot_bytes(step.into)
        files = self._files(self._whole, into)
        gradients = self._files(self._delta, self._shared.slot_bytes(step.delta))
        files |= {name: file for name, file in gradients.items() if name not in files}
        made = updated(record, files, self._parameters(record, into))
        for name, tensor in made.items():
            there = _lying(self._whole.find(file_of(name.holder), name.path), into)
            if there.data_ptr() != tensor.data_ptr():
                there.copy_(tensor.detach())
        if record.proof:
            if record.proof != digest(_bytes(place, into) for _, place in only_in_whole(self._layouts)):
                raise StoreError("its updates are not those of the training, to the bit")
            self._shared.confirmed = step.sequence
        return iteration, record_of_whole(text)

    @property
    def _whole(self) -> Layout:
        return self._layouts[WHOLE]

    @property
    def _delta(self) -> Layout:
        return self._layouts[DELTA]

    def _copy(self, step: Step) -> None:
        """What updates make anew from the base, all else from the delta."""
        into, base, delta = (self._shared.slot_bytes(slot) for slot in (step.into, step.base, step.delta))
        for start, end in self._spans:
            _uint8(into[start:end]).copy_(_uint8(base[start:end]))
        for place, source in self._rest:
            _uint8(_bytes(place, into)).copy_(_uint8(_bytes(source, delta)))

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Bytes of a slot that only whole ones have."""
        spans: list[tuple[int, int]] = []
        for start, end in sorted((p.offset_bytes, p.end_bytes) for _, p in only_in_whole(self._layouts)):
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        return [span for span in spans if span[0] < span[1]]

    @cached_property
    def _rest(self) -> list[tuple[PlacedTensor, PlacedTensor]]:
        """Places in a whole slot of what deltas have, too, and there."""
        there = {(file.name, tensor.spec.name): tensor for file in self._delta.files for tensor in file.tensors}
        return [
            (tensor, there[file.name, tensor.spec.name])
            for file in self._whole.files
            for tensor in file.tensors
            if (file.name, tensor.spec.name) in there and tensor.spec.size_bytes
        ]

    def _files(self, layout: Layout, slot: memoryview) -> dict[str, TensorFile]:
        """The files in a slot, whose memory they share as far as they lie there as in a file."""
        aliases = {spec.name: dict(spec.aliases) for spec in layout.specs}
        return {
            file.name: TensorFile({p.spec.name: _as_in_a_file(p, slot) for p in file.tensors}, aliases[file.name])
            for file in layout.files
        }

    def _parameters(self, record: Record, slot: memoryview) -> Mapping[StateName, torch.nn.Parameter]:
        """All that optimizers have, in a slot's memory."""
        aliases = {(spec.name, alias): name for spec in self._whole.specs for alias, name in spec.aliases}
        found: dict[StateName, torch.nn.Parameter] = {}
        for optimizer in record.optimizers:
            for name in (StateName(each) for group in optimizer.groups for each in group.parameters):
                file = file_of(name.holder)
                try:
                    place = self._whole.find(file, aliases.get((file, name.path), name.path))
                except KeyError:
                    raise InputError(f"{name} is in no file") from None
                value = _lying(place, slot)
                found[name] = torch.nn.Parameter(value, requires_grad=value.dtype.is_floating_point)
        return found


def warm_up() -> None:
    """The first optimizer of a process has torch import for seconds what it needs."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def _bytes(place: PlacedTensor, slot: memoryview) -> memoryview:
    return slot[place.offset_bytes : place.end_bytes]


def _uint8(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _lying(place: PlacedTensor, slot: memoryview) -> torch.Tensor:
    """A tensor in a slot's memory, its dimensions in logical order."""
    spec = place.spec
    order = spec.order or tuple(range(len(spec.shape)))
    data, dtype = _bytes(place, slot), DTYPES[spec.dtype]
    flat = _uint8(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.view([spec.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def _as_in_a_file(place: PlacedTensor, slot: memoryview) -> FileTensor:
    """A tensor whose elements are in logical order; in memory of its own where they lie in another one in the slot."""
    data = _bytes(place, slot)
    if place.spec.order is not None:
        data = memoryview(as_bytes(_lying(place, slot)).numpy())  # type: ignore[arg-type]
    return FileTensor(DTYPES[place.spec.dtype], place.spec.shape, data)
