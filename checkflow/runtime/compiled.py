"""torch.compile: compiled code writes state without hooks, so the executor is told before any of it runs."""

from __future__ import annotations

from collections.abc import Callable

from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters


class OnCompile:
    """Calls `act` at once if something was compiled in this process already, and whenever a compilation begins."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        callback_handler.register_start_callback(self._begins)
        if counters["frames"]["total"]:
            act()

    def remove(self) -> None:
        if self._begins in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._begins)

    def _begins(self, _args: CallbackArgs) -> None:
        self._act()
