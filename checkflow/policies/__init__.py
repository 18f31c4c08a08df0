"""What checkflow and other tools do with the same problem. A policy is one file here, found by its name.

What they share is in planned.py.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from checkflow.errors import InputError
from checkflow.plan import Infeasible, Problem
from checkflow.policies.planned import Planned


class Policy(Protocol):
    """What each of the files offers."""

    def plan(self, problem: Problem) -> Planned | Infeasible:
        """What the policy does with a problem, or why it can do nothing."""


def names() -> tuple[str, ...]:
    """The policies there are, in alphabetical order."""
    return tuple(sorted(module.name for module in iter_modules(__path__) if module.name != "planned"))


def load(name: str) -> Policy:
    """A policy by its name. Raises InputError for one that is not in names()."""
    if name not in names():
        raise InputError(f"policy: there is no {name!r}; choose one of {', '.join(names())}")
    return cast(Policy, import_module(f"{__name__}.{name}"))
