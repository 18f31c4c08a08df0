"""Guards: before state is written, everything of it that a checkpoint needs is read.

A guard is trusted once it has fired. Code that runs without hooks (a compiled model, a captured CUDA graph, a direct
call of `forward`) cannot be seen from here, so state whose guards are not trusted is waited for when the iteration
ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from checkflow.runtime.binding import Binding, BoundStorage
from checkflow.runtime.counters import Cause
from checkflow.torch_internals import is_batch_norm


class GuardKind(StrEnum):
    OPTIMIZER = "optimizer"  # optimizer.step, before it writes its parameters and their state
    FORWARD = "forward"  # a module's forward, before it writes its buffers
    LOAD = "load"  # load_state_dict
    UNWATCHED = "unwatched"  # the iteration's end, for state that no trusted guard covers
    REWRITE = "rewrite"  # copies made before the iteration's end go stale when their tensor is written again


CAUSES = {GuardKind.OPTIMIZER: Cause.OPTIMIZER, GuardKind.FORWARD: Cause.FORWARD, GuardKind.LOAD: Cause.LOAD}


@dataclass(slots=True, eq=False)
class Guard:
    """One place that guards, whatever is bound to it now."""

    kind: GuardKind
    subject: int | torch.nn.Module  # number of the optimizer; the module whose buffers are guarded
    inside: tuple[torch.nn.Module, ...] = ()  # modules whose buffers a compiled wrapper guards
    storages: tuple[BoundStorage, ...] = ()
    now: tuple[BoundStorage, ...] = ()  # of these, what is not left to guards inside the update
    planned: tuple[BoundStorage, ...] = ()  # of these, what the traced iteration writes
    counted: tuple[torch.Tensor, ...] = ()  # what counts the writes to that, in this order
    unplanned: tuple[BoundStorage, ...] = ()  # of these, what it does not write
    received: tuple[BoundStorage, ...] = ()  # of these, what an update writes with what other ranks made
    ever: bool = False  # it fired once
    fired: bool = False  # it fired in this iteration, as far as hooks call the executor in it

    def bind(self, binding: Binding) -> None:
        if isinstance(self.subject, int):
            self.storages = binding.optimizer_storages[self.subject]
            self.received = binding.received_storages[self.subject]
        elif self.kind is GuardKind.LOAD:
            self.storages = binding.module_storages.get(self.subject, ())
        else:
            modules = (self.subject, *self.inside)
            found = dict.fromkeys(s for module in modules for s in binding.buffer_storages.get(module, ()))
            self.storages = tuple(found)
        self.now = self.storages
        self.planned = tuple(storage for storage in self.storages if storage.written)
        self.counted = tuple(tensor for storage in self.planned for tensor in storage.counted)
        self.unplanned = tuple(storage for storage in self.storages if not storage.written)

    def leave(self, storages: Iterable[BoundStorage]) -> None:
        """To guards inside the update that begins."""
        left = frozenset(storages)
        if left or len(self.now) < len(self.storages):
            self.now = tuple(storage for storage in self.storages if storage not in left)

    def trusted(self, *, opaque: bool) -> bool:
        """Whether it will fire before the next write. `opaque`: code without hooks may have run in this process."""
        if self.kind is GuardKind.LOAD:
            return False
        if self.kind is GuardKind.FORWARD:  # the same module may run compiled next time, and count no write of a buffer
            return self.fired and not opaque
        return self.fired if opaque else self.ever


def changes(storage: BoundStorage, kind: GuardKind) -> bool:
    """Whether a guarded write may change a storage that the traced iteration does not write.

    In-place operators tell by the version counter; fused optimizers and batch norm do not.
    """
    if storage.written or kind is GuardKind.LOAD:
        return True
    for live in storage.lives:
        if live.buffer:
            if live.module is not None and is_batch_norm(live.module) and live.module.training:
                return True
        elif (live.parameter if live.parameter is not None else live.held).grad is not None:
            return True
    return False
