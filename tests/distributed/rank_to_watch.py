"""A rank that says what lives in its memory at each operator of its second iteration: python rank_to_watch.py KIND

A line is "operator NAME BYTES". Storages are asked for their size whenever an operator has run; nothing here knows how
a trace follows them.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rank_on_schedule import training
from rank_to_kill import leave, say
from torch.utils._python_dispatch import TorchDispatchMode

LETS_GO_S = 0.005  # so long gloo's threads may hold the last result, however busy the machine
SCALAR_BYTES = 8  # the host's, and losses: no trace counts the former


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in tensors_in(item))
    elif isinstance(value, (list, tuple)):
        yield from (tensor for item in value for tensor in tensors_in(item))


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, value: object) -> None:
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage)

    def bytes(self) -> int:
        sizes = (storage.nbytes() for found in self.storages.values() if (storage := found()) is not None)
        return sum(size for size in sizes if size > SCALAR_BYTES)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.see([args, kwargs or {}, result])
        time.sleep(LETS_GO_S)
        say("operator", func, self.bytes())
        return result


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    made = training(kind)
    made.iteration()
    (model,), (optimizer,) = made.models, made.optimizers
    alive = Alive()
    alive.see([*model.parameters(), *model.buffers(), *optimizer.state.values()])
    with alive:
        made.iteration()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
