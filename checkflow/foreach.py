"""A look before each foreach function that an optimizer's update calls: the only places inside it where code can run.

Nothing in eager PyTorch hooks into `optimizer.step()`. A foreach update is some ten functions over all parameters,
found as attributes of torch when they are called. While a `Look` is open they are wrapped; before and after nothing is
changed. What the wrapper costs is one Python call for each of the ten.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from checkflow.torch_internals import foreach_functions
from checkflow.wrapped import is_hookable, updater

Before = Callable[[str, Sequence[torch.Tensor]], None]  # the function's name, the tensors that it is first given

_ORIGINALS = foreach_functions()
_open: list[Look] = []  # the innermost last: an optimizer may step within another's


class Look:
    """From `open` to `close`, `before` is called in this thread before each foreach function.

    Of several that are open the innermost of each `watcher` is: an iteration that is followed may be recorded, too.
    """

    def __init__(self, before: Before, watcher: object) -> None:
        self.before = before
        self.watcher = watcher
        self.thread = 0

    def open(self) -> bool:
        """False where another thread has one open: it is the only one then that sees its update."""
        self.close()
        self.thread = threading.get_ident()
        if any(look.thread != self.thread for look in _open):
            return False
        _open.append(self)
        vars(torch).update(_WRAPPERS)
        return True

    @property
    def is_open(self) -> bool:
        """Whether it still is: `step()` may have raised, and another been closed since."""
        return self in _open

    def close(self) -> None:
        """Does nothing where it is not open."""
        if self in _open:
            del _open[_open.index(self) :]  # whatever was opened within it has ended
        if not _open:
            vars(torch).update(_ORIGINALS)


def writes_first(name: str) -> bool:
    """Whether a foreach function writes the tensors that it is first given. No other state is written by one."""
    return name.endswith("_")


def can_look(optimizer: torch.optim.Optimizer) -> bool:
    """Whether foreach functions alone may write in its update: a class of torch's own, of real parameters."""
    if not is_hookable(optimizer) or not type(updater(optimizer)).__module__.startswith("torch.optim."):
        return False
    return not any(p.is_complex() for group in optimizer.param_groups for p in group["params"])


def _wrapper(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        if _open and not torch.compiler.is_compiling():
            told: set[object] = set()
            for look in reversed(tuple(_open)):
                if look.thread == threading.get_ident() and look.watcher not in told:
                    told.add(look.watcher)
                    look.before(name, args[0] if args else ())
        return original(*args, **kwargs)

    return looked_at


_WRAPPERS = {name: _wrapper(name, original) for name, original in _ORIGINALS.items()}
