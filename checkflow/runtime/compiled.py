"""Code that writes state without hooks: what torch.compile makes, which the executor is told of, and CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from checkflow.torch_internals import Compilations

_COMPILATIONS = Compilations()


class OnCompile:
    """Calls `act` at once if something was compiled in this process already, and whenever a compilation begins."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        _COMPILATIONS.watch(self._begins)
        if _COMPILATIONS.happened:
            act()

    def remove(self) -> None:
        _COMPILATIONS.unwatch(self._begins)

    def _begins(self, _: object) -> None:
        self._act()


def has_cuda_graphs() -> bool:
    """Whether this process has captured any. What a graph replays calls no hook, and counts no write; tens of ms."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return any(issubclass(type(each), torch.cuda.CUDAGraph) for each in gc.get_objects())
