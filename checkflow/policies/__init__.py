"""What checkflow and other tools do with the same problem. A policy is one file here, found by its name.

Each answers with a schedule that the runtime executes, or says why there is none. What rules share is in rule.py.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from checkflow.errors import InputError
from checkflow.graph import Graph
from checkflow.plan import Infeasible, Problem
from checkflow.policies.rule import Asked
from checkflow.schedule import Schedule


class Policy(Protocol):
    """What each of the files offers.

    Also LONGEST, where a longer interval makes no sense unless the link needs it, MOST_LANES, where it has any, and
    OF_ONE_PROCESS, where several cannot follow it.
    """

    def schedule(self, problem: Problem, graph: Graph, asked: Asked) -> Schedule | Infeasible:
        """What the policy does with a graph's problem, at the graph's anchors, or why it can do nothing."""


def names() -> tuple[str, ...]:
    """The policies there are, in alphabetical order."""
    return tuple(sorted(module.name for module in iter_modules(__path__) if module.name != "rule"))


def load(name: str) -> Policy:
    """A policy by its name. Raises InputError for one that is not in names()."""
    if name not in names():
        raise InputError(f"policy: there is no {name!r}; choose one of {', '.join(names())}")
    return cast(Policy, import_module(f"{__name__}.{name}"))


def longest(name: str) -> int | None:
    """The longest interval that makes sense for a policy, in iterations, unless the link needs more; None: any does."""
    found: int | None = getattr(load(name), "LONGEST", None)
    return found


def sends_gradients(name: str) -> bool:
    """Whether a policy may send gradients along, by which updates are made again."""
    return longest(name) is not None  # at a longer interval it is checkflow's plan


def most_lanes(name: str) -> int | None:
    """How many lanes a policy has at most; None: it has none."""
    found: int | None = getattr(load(name), "MOST_LANES", None)
    return found


def is_of_one_process(name: str) -> bool:
    """Whether several processes that train together cannot follow a policy."""
    return hasattr(load(name), "OF_ONE_PROCESS")
