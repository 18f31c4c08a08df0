"""Tensors and generators that an iteration can reach, named by the way: "iteration.x", "iteration.scaler._scale".

A replay finds a program's inputs in another Training of the same factory by these names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import cast

import torch

from checkflow.state.live import parameters_of
from checkflow.state.shards import local
from checkflow.torch_internals import MODULE_DICTS
from checkflow.trace.execution import is_library
from checkflow.trace.state import state_of
from checkflow.training import Training

_MOST = 200_000  # objects, of a loop that runs, which waits for this, and of what is shared
_MANY = 4096  # longer containers are data sets of Python objects, not inputs
_LEAVES = (str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size)

Reached = torch.Tensor | torch.Generator
_QUEUED = re.compile(r"\[[0-9]+\]")  # a deque's item in a path
_REACHED = (torch.Tensor, torch.Generator)
_OUTER = "\N{PRIME}"  # behind a path, of what would have it, too
_CLASS = "__class__"  # in a path, from an object to what its class has


def sources_of(training: Training, model: str) -> dict[str, Reached]:
    """All that a program may take as input, by name: state, gradients, and what else is reachable."""
    found: dict[str, Reached] = {state.name: state.tensor for state in state_of(training, model)}
    for name, parameter in parameters_of(training):
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
    return found | reachable(training)


def reachable(training: Training) -> dict[str, Reached]:
    """Name -> tensor or generator; each object under the first name that a walk meets, and where it is in a deque.

    Also what users' classes, functions and modules have, wherever a walk meets one.
    """
    roots: list[tuple[str, object]] = [
        ("optimizer", training.optimizers),
        ("model", training.models),
        ("iteration", training.iteration),
    ]
    return reach(roots, getattr(inspect.unwrap(training.iteration), "__globals__", None), shared=True)


def reachable_from(training: Training, frame: types.FrameType | None) -> dict[str, Reached]:
    """What a loop that runs can reach, and who called it: variables of frames, but libraries', and globals they name.

    Objects of checkflow's are left out: what they hold is no training's.
    """
    return reach(_roots_of(training, frame), None, shared=True, of_ours=False, most=_MOST)


def objects_from(training: Training, frame: types.FrameType | None, kinds: tuple[type, ...]) -> dict[str, object]:
    """The same of objects of these kinds, without those that an iterator of a library's has for itself.

    A class of checkflow's that is one of `kinds` is found, and not followed."""
    return _walk(_roots_of(training, frame), None, kinds, of_ours=False, most=_MOST, in_libraries=False)


def objects_in(roots: list[tuple[str, object]], kinds: tuple[type, ...]) -> list[object]:
    """What each of these roots has of these kinds: two trainings may name two things alike."""
    found = [_walk([root], None, kinds, shared=False, of_ours=True, most=None) for root in roots]
    return [value for each in found for value in each.values()]


def _roots_of(training: Training, frame: types.FrameType | None) -> list[tuple[str, object]]:
    roots: list[tuple[str, object]] = [("optimizer", training.optimizers), ("model", training.models)]
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            names = frame.f_globals if frame.f_locals is frame.f_globals else _named_globals(frame)
            roots += [("iteration", names), ("iteration", dict(frame.f_locals))]
        frame = frame.f_back
    return roots


def _named_globals(frame: types.FrameType) -> dict[str, object]:
    return {name: frame.f_globals[name] for name in _names(frame.f_code) if name in frame.f_globals}


def reach(
    roots: list[tuple[str, object]],
    module: object,
    *,
    shared: bool = False,
    of_ours: bool = True,
    most: int | None = None,
) -> dict[str, Reached]:
    """The same from these roots, the last one first. `module`: the globals that functions may be followed to.

    With `shared` also what `_shared` gives. Without `of_ours` objects of checkflow's are left out; `most`: how many are
    looked at.
    """
    return cast(dict[str, Reached], _walk(roots, module, _REACHED, shared=shared, of_ours=of_ours, most=most))


def _walk(
    roots: list[tuple[str, object]],
    module: object,
    kinds: tuple[type, ...],
    *,
    shared: bool = True,
    of_ours: bool,
    most: int | None,
    in_libraries: bool = True,
) -> dict[str, object]:
    found: dict[str, object] = {}
    seen: set[int] = set()
    keep: list[object] = []  # ids stay unique while what they name is alive
    todo = list(roots)
    queues: list[tuple[str, object]] = []  # come last: what a variable has as well is known by that
    apart = deque[tuple[str, object]]()  # what is shared, at the very last: what is found without it keeps its name
    while (todo or queues or apart) and (most is None or len(keep) < most):
        if most is None and not (todo or queues):
            most = len(keep) + _MOST  # what is shared may lead to all of a program
        path, value = (todo or queues or apart).pop()
        with contextlib.suppress(Exception):  # an object's own code may raise when it is looked at, as a proxy's does
            if value is None or isinstance(value, _LEAVES):
                continue
            if id(value) in seen:
                if isinstance(value, kinds) and is_queued(path):
                    found[path] = local(value) if isinstance(value, torch.Tensor) else value
                continue
            if not of_ours and f"{type(value).__module__}.".startswith("checkflow."):
                if type(value) in kinds:  # a script made it
                    found.setdefault(path, value)
                continue
            seen.add(id(value))
            keep.append(value)
            if not in_libraries and isinstance(value, types.GeneratorType) and is_library(value.gi_code.co_filename):
                continue
            if isinstance(value, kinds):
                while path in found:  # another function that runs has a variable of this name
                    path += _OUTER
                found[path] = local(value) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                if value.is_leaf and value.grad is not None:
                    todo.append((f"{path}.grad", value.grad))
            elif not isinstance(value, torch.Generator):
                onto = queues if isinstance(value, deque) else todo
                onto += reversed([(f"{path}.{key}", item) for key, item in _children(value, module)])
                if shared:
                    apart.extendleft((f"{path}.{key}", item) for key, item in _shared(value))
    return found


def _children(value: object, module: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        if len(value) <= _MANY:
            for index, (key, item) in enumerate(list(value.items())):
                yield (str(key) if isinstance(key, (str, int)) else str(index)), item
    elif isinstance(value, (list, tuple)):
        if len(value) <= _MANY:
            yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, deque):
        if len(value) <= _MANY:  # copied first: other threads may add to it
            yield from ((f"[{index}]", item) for index, item in enumerate(tuple(value)))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _variables(value, with_globals=value.__globals__ is module)
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from dict(value.gi_frame.f_locals).items()
    elif not isinstance(value, (type, types.ModuleType)):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from list(attributes.items())
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, slot):
                    yield slot, getattr(value, slot)


def _shared(value: object) -> Iterator[tuple[str, object]]:
    """What a user's class, function or module has, or a function names; and of an object its class."""
    if isinstance(value, types.FunctionType):
        yield from value.__dict__.items()
        if _is_users(value.__globals__.get("__name__", "")):
            names = tuple(_names(value.__code__))
            yield from [(name, value.__globals__[name]) for name in names if name in value.__globals__]
    elif isinstance(value, (classmethod, staticmethod)):
        yield "func", value.__func__
    elif isinstance(value, types.ModuleType):
        if _is_users(value.__name__):
            yield from list(vars(value).items())
    elif isinstance(value, type):
        for base in filter(lambda base: _is_users(base.__module__), value.__mro__):
            yield from list(vars(base).items())
    elif _is_users(type(value).__module__):
        yield _CLASS, type(value)


@functools.cache
def _is_users(module: str) -> bool:
    """Whether this name is of a script, of a notebook's cells, or of a file that is no library's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    is_ours = module.partition(".")[0] == "checkflow"
    return module == "__main__" or (file is not None and not is_ours and not is_library(file))


def _variables(function: types.FunctionType, *, with_globals: bool) -> Iterator[tuple[str, object]]:
    """A function's closure and defaults, and the globals it names where it stands in the iteration's own module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not set yet
            yield name, cell.cell_contents
    yield from ((f"default{i}", item) for i, item in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    if with_globals:
        for name in _names(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def is_queued(path: str) -> bool:
    """Whether it leads through a deque."""
    return to_list(path) != path


def to_list(path: str) -> str:
    """What a person can list: of a deque's item, which moves on, the deque."""
    return ".".join(takewhile(lambda part: not _QUEUED.fullmatch(part), path.split(".")))


def shown(path: str) -> str:
    """As code would have it: what the walk begins with and where modules keep things is left out."""
    plain, left_out = path.replace(_OUTER, ""), {*MODULE_DICTS, _CLASS}
    parts = (part.strip("[]") if _QUEUED.fullmatch(part) else part for part in plain.split("."))
    return ".".join(part for part in parts if part not in left_out).removeprefix("iteration.")
