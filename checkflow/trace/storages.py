"""Every storage that operators meet, with its birth and its death as eager PyTorch frees it.

A storage dies when its last tensor does, wherever that was held; a weak reference to the storage object sees it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from checkflow.errors import TraceError
from checkflow.graph import Role
from checkflow.torch_internals import FakeTensor, storage_id


@dataclass(slots=True, eq=False)
class Storage:
    """What is known of one storage. `identity` is unique among those alive."""

    identity: int
    size_bytes: int
    on_cpu: bool
    scalar: bool  # made from host scalars alone: Adam's step, a constant, or computed from such
    name: str = ""
    role: Role | None = None
    of: str = ""  # of an optimizer's entry: its parameter's name, where all of the storage is of one
    gradients: dict[str, tuple[int, int]] = field(default_factory=dict)  # by parameter: bytes, from where to where
    born: int = 0  # step that allocated it; 0: before the iteration, or no operator did
    freed: int | None = None  # last step during which it was resident; None: still alive
    last_use: int = 0
    stale: bool = False  # a real scalar that a fake operator wrote: its value is unknown
    value: torch.UntypedStorage | None = None  # what a fake one would hold, where that is known


class OutOfRoom(BaseException):
    """Real tensors would take more host memory than there is. No Exception, so that no user code swallows it."""


class Ledger:
    """The storages alive, and `step`, the operators that have run in the iteration (the clock of births and deaths).

    `room_bytes` is the host memory that real tensors may take; None: as much as they like.
    """

    def __init__(self, room_bytes: int | None = None) -> None:
        self.room_bytes = room_bytes
        self.real_bytes = 0  # of real tensors on the host, so far as they were seen
        self.step = 0
        self.deaths = 0  # of storages, so far
        self.on_cuda = False  # the model is: then all CPU tensors are the host's
        self.alive: dict[int, Storage] = {}
        self.freed: list[Storage] = []  # those born before the iteration, and freed by it
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def alive_bytes(self) -> int:
        return sum(storage.size_bytes for storage in self.alive.values())

    def is_host(self, storage: Storage) -> bool:
        return storage.on_cpu if self.on_cuda else storage.scalar

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """The tensor's storage, if it was seen before."""
        return self.alive.get(storage_id(tensor.untyped_storage()))

    def see(self, tensor: torch.Tensor) -> Storage:
        """The tensor's storage. One that was never seen existed before, or is a constant that no operator made."""
        storage = self.find(tensor)
        return storage if storage is not None else self.add(tensor, scalar=is_scalar(tensor) and not is_fake(tensor))

    def add(self, tensor: torch.Tensor, *, scalar: bool, born: int = 0) -> Storage:
        """A new storage, watched until it dies."""
        untyped = tensor.untyped_storage()
        storage = Storage(storage_id(untyped), untyped.nbytes(), tensor.device.type == "cpu", scalar, born=born)
        return self._watch(untyped, storage, 0 if is_fake(tensor) or not storage.on_cpu else storage.size_bytes)

    def resized(self, untyped: torch.UntypedStorage, *, born: int = 0) -> Storage:
        """What a storage that was seen is from now on: another one, at the same place. The one before it has died."""
        before = self.alive[storage_id(untyped)]
        after = Storage(before.identity, untyped.nbytes(), before.on_cpu, scalar=False, born=born)
        real = untyped.device.type == "cpu" and before.on_cpu
        end = self._references[before.identity].__callback__
        assert end is not None
        end(self._references[before.identity])
        return self._watch(untyped, after, after.size_bytes if real else 0)

    def _watch(self, untyped: torch.UntypedStorage, storage: Storage, real_bytes: int) -> Storage:
        identity = storage.identity
        self.alive[identity] = storage
        self.real_bytes += real_bytes
        self.check_room()

        def dead(_: object) -> None:
            storage.freed = self.step
            self.real_bytes -= real_bytes
            self.forget(storage)
            self.deaths += not self.is_host(storage)
            if not storage.born:
                self.freed.append(storage)
            del self.alive[identity], self._references[identity]

        self._references[identity] = weakref.ref(untyped, dead)
        return storage

    def know(self, storage: Storage, value: torch.UntypedStorage) -> None:
        """A fake storage would hold this."""
        self.forget(storage)
        storage.value = value
        self.real_bytes += value.nbytes()

    def forget(self, storage: Storage) -> None:
        """What a fake storage would hold is not known, or no more."""
        if storage.value is not None:
            self.real_bytes -= storage.value.nbytes()
            storage.value = None

    def check_room(self, more_bytes: int = 0) -> None:
        """Raises OutOfRoom where real tensors take more than there is, with so many bytes more."""
        if self.room_bytes is not None and self.real_bytes + more_bytes > self.room_bytes:
            raise OutOfRoom

    def start(self) -> None:
        """The recorded iteration begins: all that is alive existed before it."""
        self.step = 0
        self.freed.clear()
        for storage in self.alive.values():
            storage.born = storage.last_use = 0


def without_storage(line: str, verb: str, tensor: torch.Tensor) -> TraceError:
    """For code in an iteration that takes or makes such a tensor."""
    if verb == "makes" and tensor.layout == torch.sparse_coo:
        return TraceError(
            f"{line}: makes a sparse tensor, which has no storage to checkpoint; use dense gradients (sparse=False); "
            "where the optimizer needs sparse ones, attach goes on without a plan"
        )
    layout = "nested" if tensor.is_nested else tensor.layout
    return TraceError(
        f"{line}: {verb} a tensor of layout {layout}, which has no storage to checkpoint; use a dense one"
    )


def is_scalar(tensor: torch.Tensor) -> bool:
    """One element, on the CPU."""
    return tensor.numel() == 1 and tensor.device.type == "cpu"


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def is_new(value: object, ledger: Ledger) -> TypeGuard[torch.Tensor]:
    """A tensor whose storage was never seen."""
    return isinstance(value, torch.Tensor) and ledger.find(value) is None
