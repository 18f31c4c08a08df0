"""Values beside fake tensors, as far as they are known, so that code which reads them goes on.

Factories read what they have just made (drop-path rates, an initialisation that looks at a norm), and iterations look
at masks and indices that follow from the batch. An operator all of whose tensors are known runs a second time, on real
tensors: a storage's value is known only if every write since its birth ran on the value, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from checkflow.torch_internals import OpOverload, tree_map, without_modes
from checkflow.trace.storages import Ledger, is_fake
from checkflow.trace.writes import tensors_in

SMALL_BYTES = 1 << 20  # a larger storage is known only where a factory cannot be run without


class Values:
    """Runs operators on values. `everything` keeps those of large storages, too, until `built` is called."""

    def __init__(self, ledger: Ledger, *, everything: bool) -> None:
        self._ledger = ledger
        self._everything = everything
        self._draws = True

    def built(self) -> None:
        """The factory has returned: an iteration's random numbers are nobody's to know, nor its large tensors."""
        self._everything = self._draws = False
        for storage in self._ledger.alive.values():
            if storage.size_bytes > SMALL_BYTES:
                self._ledger.forget(storage)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a fake tensor would hold; None where that is not known."""
        with without_modes():
            return self._real(tensor) if self._is_known(tensor) else None

    def run(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        tensors: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor],
        fresh_bytes: int,
    ) -> tuple[object] | None:
        """The result on values, in a tuple; where something is not known, None: then what it changes is not, either."""
        result = None
        if self._runs(func, fresh_bytes) and all(map(is_fake, changed)) and all(map(self._is_known, tensors)):
            self._ledger.check_room(fresh_bytes)
            try:
                with without_modes():
                    result = (func(*tree_map(self._argument, args), **tree_map(self._argument, dict(kwargs))),)
            except Exception:  # noqa: BLE001 (it is not known)
                pass
        if result is None:
            for tensor in changed:
                self._ledger.forget(self._ledger.see(tensor))
        return result

    def bind(self, result: object, known: object) -> None:
        """The storages that an operator allocated have these values."""
        for fake, real in zip(tensors_in(result), tensors_in(known), strict=True):
            storage = self._ledger.find(fake)
            same = (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
            if storage is not None and storage.value is None and is_fake(fake) and same:
                self._ledger.know(storage, real.untyped_storage())

    def _runs(self, func: OpOverload, fresh_bytes: int) -> bool:
        if func.namespace != "aten" or (torch.Tag.nondeterministic_seeded in func.tags and not self._draws):
            return False
        return fresh_bytes <= SMALL_BYTES or self._everything

    def _is_known(self, tensor: torch.Tensor) -> bool:
        storage = self._ledger.find(tensor)
        if not is_fake(tensor):
            return storage is None or not storage.stale
        return storage is not None and storage.value is not None and not tensor.is_conj() and not tensor.is_neg()

    def _argument(self, value: object) -> object:
        return self._real(value) if isinstance(value, torch.Tensor) and is_fake(value) else value

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """A known tensor on its value."""
        known = self._ledger.see(tensor).value
        assert known is not None
        base = torch.empty(0, dtype=tensor.dtype, device=known.device)
        return base.set_(known, int(tensor.storage_offset()), tensor.shape, tensor.stride())
