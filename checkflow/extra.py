"""What a training lists beside models and optimizers, `extra={name: ...}`: modules, tensors, what gives its state.

A module's tensors are named as a model's, "extra.ema/module.weight"; a tensor is "extra.hidden/tensor". Both are bound
once, so they have to be changed in place. A dict, a list, a deque, or an object with state_dict and load_state_dict, is
asked anew each time: its tensors, "extra.batch/x" and "extra.rows/0", may be others in each iteration. So is a module
whose code adds to its state_dict, and a random generator of NumPy's or Python's.
"""

from __future__ import annotations

import random
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from checkflow.errors import InputError
from checkflow.given import Kind
from checkflow.torch_internals import EXTRA_STATE, is_persistent, own_buffers, own_parameters

TENSOR = "tensor"  # the path of a tensor that is listed itself
_NAMESPACE = Kind((Mapping,), "globals(), or the vars() of an object")
_NAMED = Kind((str,), "the name of a variable")
_PREFIX = "extra."  # of its holders
_MAX_DEPTH = 32  # of nested containers
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@runtime_checkable
class Stateful(Protocol):
    """The protocol of LR schedulers, GradScaler, torchdata's StatefulDataLoader and checkflow.ResumableLoader."""

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


class Holder:  # checkpoints have this name as the type of such an object
    """A dict of the user's. Restoring replaces its values: what a tensor in it is a view of stays as it is."""

    def __init__(self, held: dict[object, object]) -> None:
        self._held = held

    @property
    def held(self) -> object:
        """What the user listed."""
        return self._held

    def state_dict(self) -> dict[str, object]:
        return dict(self._held)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._held.clear()
        self._held.update(state_dict)


class Items(Holder):  # checkpoints have this name as the type of such an object
    """A list or a deque of the user's, likewise. How many items a deque takes at most stays as the user made it."""

    def __init__(self, name: str, held: list[object] | deque[object]) -> None:
        self._name = name
        self._items = held

    @property
    def held(self) -> object:
        return self._items

    def state_dict(self) -> dict[str, object]:
        return {str(index): item for index, item in enumerate(tuple(self._items))}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Raises InputError where a deque does not take as many."""
        most = self._items.maxlen if isinstance(self._items, deque) else None
        if most is not None and len(state_dict) > most:
            raise InputError(
                f"{self._name}: has {len(state_dict)} items in the checkpoint, and takes {most}; make its maxlen larger"
            )
        self._items.clear()
        self._items.extend(state_dict.values())


class RandomState:  # checkpoints have this name as the type of such a generator
    """A generator of NumPy's or Python's: numpy.random.Generator and RandomState, random.Random."""

    def __init__(self, name: str, held: np.random.Generator | np.random.RandomState | random.Random) -> None:
        self._name = name
        self._held = held

    def state_dict(self) -> dict[str, object]:
        if isinstance(self._held, np.random.Generator):
            return {"kind": "Generator", "state": dict(self._held.bit_generator.state)}
        if isinstance(self._held, np.random.RandomState):
            return {"kind": "RandomState", "state": self._held.get_state(legacy=False)}
        return {"kind": "Random", "state": self._held.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises InputError for the state of another kind of generator."""
        ours, theirs = (_kind_of(each) for each in (self.state_dict(), state_dict))
        if ours != theirs:
            raise InputError(f"{self._name}: is a {ours}, {theirs} in the checkpoint; use the same kind of generator")
        if isinstance(self._held, np.random.Generator):
            self._held.bit_generator.state = state_dict["state"]
        elif isinstance(self._held, np.random.RandomState):
            self._held.set_state(state_dict["state"])
        else:
            self._held.setstate(state_dict["state"])


def _kind_of(state: Mapping[str, Any]) -> str:
    inner = state.get("state")
    return f"{state.get('kind')} of {inner['bit_generator']}" if isinstance(inner, dict) else str(state.get("kind"))


def is_random(value: object) -> bool:
    """Whether it is a random generator that `extra` takes."""
    return isinstance(value, (np.random.Generator, np.random.RandomState)) or (
        isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    )


class Variables:
    """Variables that a script replaces as it goes: `extra={"loop": Variables(globals(), "batch", "best")}`.

    Restoring sets them, where their namespace is one that can be written to: a module's, or an object's `vars()`.

    Args:
        namespace: of the variables.
        names: of those to take along: tensors and plain values.
    """

    def __init__(self, namespace: MutableMapping[str, Any], *names: str) -> None:
        _NAMESPACE.check("Variables: namespace", namespace)
        caller = sys._getframe(1)
        if namespace is not caller.f_globals and namespace.keys() == caller.f_locals.keys():
            raise InputError(
                "Variables: a function's locals() cannot be set; keep them in a dict, extra={'held': held}"
            )
        for name in names:
            _NAMED.check("Variables: names", name)
            if name not in namespace:
                raise InputError(f"Variables: there is no {name!r} yet; make this where all of them have a value")
        if not names:
            raise InputError('Variables: names none; give those to take along, Variables(globals(), "batch")')
        self._namespace = namespace
        self._names = names

    def are_of(self, holder: object) -> bool:
        """Whether its namespace is `vars(holder)`."""
        return self._namespace is getattr(holder, "__dict__", None)

    def state_dict(self) -> dict[str, object]:
        return {name: self._namespace[name] for name in self._names}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._namespace.update((name, value) for name, value in state_dict.items() if name in self._names)


@dataclass(frozen=True, slots=True)
class Extra:
    """The same, sorted by kind; by holder, "extra.ema"."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Stateful] = field(default_factory=dict)

    @classmethod
    def of(cls, listed: object) -> Extra:
        """Raises InputError that names the first that cannot be taken."""
        found = cls()
        if not isinstance(listed, Mapping):
            raise InputError(f'extra: is a {type(listed).__name__}; give a dict of what to take along, {{"ema": ema}}')
        for name, value in listed.items():
            if not isinstance(name, str) or _NAME.fullmatch(name) is None:
                raise InputError(f"extra: {name!r:.80} cannot be a file's name; use letters, digits, _ and -")
            holder = _PREFIX + name
            if isinstance(value, torch.nn.Module):
                if added_entries(value):
                    found.objects[holder] = value
                elif is_empty(value):
                    raise InputError(
                        f"{holder}: a {type(value).__name__} that gives no state; leave it out, or make its state "
                        "part of its state_dict() (a metric: metric.persistent(True))"
                    )
                else:
                    found.modules[holder] = value
            elif isinstance(value, torch.Tensor):
                found.tensors[holder] = value
            elif isinstance(value, Stateful) and not isinstance(value, type):
                found.objects[holder] = value
            elif isinstance(value, (dict, list, deque)):
                if more := _beside_items(value):
                    raise InputError(
                        f"{holder}: a {type(value).__name__} has more than its items ({more!r:.80}); give its class "
                        "state_dict and load_state_dict"
                    )
                found.objects[holder] = Holder(value) if isinstance(value, dict) else Items(holder, value)
            elif is_random(value):
                found.objects[holder] = RandomState(holder, value)
            else:
                raise InputError(f"{holder}: {_refusal(value)}")
        return found

    def takes(self, holder: object) -> bool:
        """Whether it is taken along: itself, some of its variables, or by an object that has it."""
        return any(
            member is holder
            or (isinstance(member, Variables) and member.are_of(holder))
            or any(each is holder for each in getattr(member, "__dict__", {}).values())
            for member in self.objects.values()
        )

    def tensors_seen(self) -> Iterator[torch.Tensor]:
        """All there are now. An object of a class is not asked, for that may change it: those in its variables."""
        yield from _tensors_in([*self.modules.values(), *self.tensors.values()])
        for member in self.objects.values():
            yield from _tensors_in(
                member.state_dict() if isinstance(member, (Holder, Variables)) else getattr(member, "__dict__", member)
            )

    @property
    def holders(self) -> tuple[str, ...]:
        return (*self.modules, *self.tensors, *self.objects)


def key_of(holder: str) -> str | None:
    """What the user calls it: "ema" for "extra.ema"; None for what was not listed."""
    return holder.removeprefix(_PREFIX) if holder.startswith(_PREFIX) else None


def _beside_items(value: dict[object, object] | list[object] | deque[object]) -> str:
    """An attribute of an object of a class of one's own, which is none of its items; "" where it has none."""
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
    named = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    own = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in named if hasattr(value, name)}}
    items = value if isinstance(value, dict) else {}
    alone = (name for name, held in own.items() if name not in items or items[name] is not held)
    return next((name for name in alone if not name.startswith("__")), "")


def _refusal(value: object) -> str:
    if isinstance(value, torch.Generator):
        return "a torch.Generator is no state of this kind; give it in generators={...}"
    return (
        f"a {type(value).__name__} cannot be taken; give a module, a tensor, a dict, list or deque of tensors and "
        "plain values, a NumPy Generator, or an object with state_dict and load_state_dict"
    )


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, bool]]:
    """(path, the module that owns it, its name there, whether it is a buffer) of all that state_dict would give."""
    for path, part in module.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, parameter in own_parameters(part).items():
            if parameter is not None:
                yield start + name, part, name, False
        for name, buffer in own_buffers(part).items():
            if buffer is not None and is_persistent(part, name):
                yield start + name, part, name, True


def added_entries(module: torch.nn.Module) -> tuple[str, ...]:
    """What a module's own code adds to its state_dict, as metrics do: neither parameter, buffer nor extra state."""
    known = {
        id((own_buffers if is_buffer else own_parameters)(part)[name])
        for _, part, name, is_buffer in module_tensors(module)
    }
    try:
        given = module.state_dict(keep_vars=True)
    except TypeError:  # one of its own, without arguments
        given = module.state_dict()
    return tuple(
        key for key, value in given.items() if id(value) not in known and key.rpartition(".")[2] != EXTRA_STATE
    )


def is_empty(module: torch.nn.Module) -> bool:
    """Whether a checkpoint has nothing of it."""
    return not any(True for _ in module_tensors(module)) and not module.state_dict()


def with_leaves(state: object, kinds: tuple[type, ...], change: Callable[[str, object], object]) -> object:
    """The same containers with each leaf of these kinds changed, by its path, which no two of them share.

    A list, dict or deque that is met twice is one again, and what contains itself is left as it is.
    """
    used = {"__metadata__"}  # safetensors' own
    met: dict[int, tuple[object, object]] = {}  # by id: it, so that the id stays its own, and what was made of it

    def walk(value: object, path: str, depth: int) -> object:
        if isinstance(value, kinds):
            name = path
            while name in used:
                name += "'"
            used.add(name)
            return change(name, value)
        if not depth:
            return value
        if type(value) is tuple:  # which cannot be changed through one of its names and read through another
            return made_of(value, path, depth)
        if id(value) not in met:
            met[id(value)] = value, value
            met[id(value)] = value, made_of(value, path, depth)
        return met[id(value)][1]

    def made_of(value: object, path: str, depth: int) -> object:
        start = f"{path}." if path else ""
        if type(value) is dict or type(value) is OrderedDict:
            pairs = [(key, walk(item, f"{start}{key}", depth - 1)) for key, item in value.items()]
            return type(value)(pairs)
        if type(value) is list or type(value) is tuple:
            return type(value)(walk(item, f"{start}{index}", depth - 1) for index, item in enumerate(value))
        if type(value) is deque:  # copied first: other threads may add to it
            items = [walk(item, f"{start}{index}", depth - 1) for index, item in enumerate(tuple(value))]
            return deque(items, value.maxlen)
        return value

    return walk(state, "", _MAX_DEPTH)


def tensors_of(member: Stateful) -> dict[str, torch.Tensor]:
    """The tensors of an object's state now, by path."""
    found: dict[str, torch.Tensor] = {}

    def note(path: str, leaf: object) -> object:
        assert isinstance(leaf, torch.Tensor)
        found[path] = leaf
        return leaf

    with_leaves(member.state_dict(), (torch.Tensor,), note)
    return found


def _tensors_in(held: object, depth: int = _MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Those in containers and modules."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, torch.nn.Module):
        yield from (tensor for _, tensor in (*held.named_parameters(), *held.named_buffers()))
    elif isinstance(held, (Mapping, list, tuple, deque)) and depth:
        items = held.values() if isinstance(held, Mapping) else tuple(held)
        yield from (tensor for item in items for tensor in _tensors_in(item, depth - 1))
