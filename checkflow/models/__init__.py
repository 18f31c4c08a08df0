"""The bundled networks. A model is one file here, found by its name; files that begin with "_" are shared parts."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from checkflow.errors import InputError

if TYPE_CHECKING:
    from checkflow.training import Training

NAMES = tuple(sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")))


def factory(name: str) -> Callable[..., Training]:
    """The `training` function of a bundled model. Raises InputError for a name that is not in NAMES."""
    if name not in NAMES:
        raise InputError(f"model: {name!r} is not bundled; choose one of {', '.join(NAMES)}, or give a Python file")
    training: Callable[..., Training] = import_module(f"{__name__}.{name}").training
    return training
