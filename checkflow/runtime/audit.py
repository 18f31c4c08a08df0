"""A search for writes that no guard saw: sampled bytes of the state, compared before each guarded write.

Exponential moving averages, `.data` and clamps between iterations write state where no hook runs. An offload that was
reading it then may have torn the checkpoint. Each iteration samples other tensors; reading them back costs a
synchronization, so this is for finding out, not for every run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from checkflow.errors import AuditError
from checkflow.runtime.binding import BoundStorage

_SAMPLED_TENSORS = 64
_SAMPLED_BYTES = 4096


class Audit:
    """Samples at each iteration's end, compared once: at the tensor's first guard, or at the next iteration's end."""

    def __init__(self) -> None:
        self._samples: dict[BoundStorage, torch.Tensor] = {}
        self._turn = 0

    def sample(self, storages: Iterable[BoundStorage], waited_for: frozenset[BoundStorage]) -> None:
        """The iteration has ended. What was waited for may be written at will."""
        self.check(tuple(self._samples))
        found = [storage for storage in storages if storage not in waited_for]
        for offset in range(min(_SAMPLED_TENSORS, len(found))):
            storage = found[(self._turn + offset) % len(found)]
            self._samples[storage] = _bytes_of(storage)
        self._turn += _SAMPLED_TENSORS

    def check(self, storages: Iterable[BoundStorage]) -> None:
        """These are about to be written. Raises AuditError where one already was."""
        for storage in storages:
            sample = self._samples.pop(storage, None)
            if sample is not None and not torch.equal(sample, _bytes_of(storage)):
                self._samples.clear()
                raise AuditError(
                    f"audit: {storage.name} was written outside of its guards (not by its optimizer's step or its "
                    "module's forward); write it before ckpt.step(), or right before the optimizer's step"
                )


def _bytes_of(storage: BoundStorage) -> torch.Tensor:
    stride = max(1, storage.data.numel() // _SAMPLED_BYTES)
    return storage.data[::stride].clone().cpu()
