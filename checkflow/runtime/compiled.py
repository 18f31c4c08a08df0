"""torch.compile: compiled code writes state without hooks, so the executor is told before any of it runs."""

from __future__ import annotations

from collections.abc import Callable

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
