"""Whether the parameters that ranks have alike are still updated by the sum of all ranks' gradients.

DistributedDataParallel decides in a forward pass whether the backward pass will sum. So its forward passes are watched,
from attach to close: an update by gradients that stayed on this rank parts the ranks for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from checkflow.errors import InputError
from checkflow.module_hook import ModuleHook
from checkflow.torch_internals import versions
from checkflow.torch_ranks import is_in_join, may_differ, notes_join, received_by

_OWN = "or attach what DistributedDataParallel wraps (ddp.module), so that each rank saves all of its own"


@dataclass(frozen=True, slots=True)
class Summing:
    """A module that sums gradients over ranks. `is_divided`: of its parameters another rank may save some."""

    module: torch.nn.Module
    is_divided: bool


@dataclass(eq=False, slots=True)
class _Watched:
    """What one has done. `unsummed`: frozen parameters that are alike, by name; it sums nothing of them."""

    unsummed: Mapping[str, torch.nn.Parameter]
    unsynced: list[int] | None = None  # versions of its parameters, where the last backward pass is on this rank alone
    has_parted: bool = False

    def begins(self, ddp: DistributedDataParallel, _args: object) -> None:
        """A forward pass."""
        notes_join(ddp)
        if torch.is_grad_enabled():
            self.look(ddp)
            self.unsynced = None if ddp.require_backward_grad_sync else versions(received_by(ddp))

    def look(self, ddp: DistributedDataParallel) -> None:
        """Whether there was an update since the last forward pass."""
        if self.unsynced is not None and self.unsynced != versions(received_by(ddp)):
            self.has_parted = True


_watched: WeakKeyDictionary[torch.nn.Module, _Watched] = WeakKeyDictionary()


def watch(modules: Mapping[DistributedDataParallel, Mapping[str, torch.nn.Parameter]]) -> list[RemovableHandle]:
    """From now on, until the handles are removed. Each with the parameters that it sums nothing of, by name."""
    handles = []
    for ddp, unsummed in modules.items():
        _watched[ddp] = watched = _Watched(unsummed)
        handles.append(ddp.register_forward_pre_hook(ModuleHook(watched.begins), prepend=True))
    return handles


def watch_anew(modules: Iterable[torch.nn.Module]) -> None:
    """Their state becomes a checkpoint's, which ranks have alike."""
    for watched in (_watched[module] for module in modules if module in _watched):
        watched.unsynced, watched.has_parted = None, False


def require_alike(summing: Iterable[Summing]) -> None:
    """Raises InputError where what is saved once may now differ by rank, and where ranks are at different moments."""
    for each in summing:
        if isinstance(each.module, DistributedDataParallel) and is_in_join(each.module):
            raise InputError(
                "step: is called within Join, where ranks with fewer batches have made fewer iterations; call it after "
                "the with block, where all have joined"
            )
        if each.is_divided:
            _require_sums(each.module)


def _require_sums(module: torch.nn.Module) -> None:
    watched = _watched.get(module)
    if watched is not None and isinstance(module, DistributedDataParallel):
        watched.look(module)
        if thawed := [name for name, parameter in watched.unsummed.items() if parameter.requires_grad]:
            raise InputError(
                f"step: {thawed[0]} was frozen when DistributedDataParallel was made, and its gradient is not summed "
                f"now; wrap the model anew and attach that, {_OWN}"
            )
    if may_differ(module) or (watched is not None and watched.has_parted):
        raise InputError(
            "step: ranks that had parameters alike may not have them so any more: the sum of their gradients is "
            "off or has a hook (no_sync, set_requires_all_reduce, set_all_reduce_hook, register_comm_hook); have it on "
            f"from the last backward pass of an iteration to its step(), set this before attach, {_OWN}"
        )
