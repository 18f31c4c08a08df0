"""What a training that runs changes, and nobody has attached: random generators, passes over loaders, what
communication hooks keep of a wrapper that was not given, and networks that are written now and then, as a target
network is, or beside code that nobody can record.

Looked at after iterations 2, 5, 11, 23 and so on; from the third look on that takes at most a hundredth of the time.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from checkflow.learning.loaders import LOADERS, Loaders
from checkflow.state.memory import has_storage
from checkflow.state.shards import local
from checkflow.torch_internals import generator_id, is_persistent, own_buffers, own_parameters, storage_id, versions
from checkflow.torch_ranks import hook_states
from checkflow.trace.held import objects_held, storages_held
from checkflow.trace.reachable import objects_from, shown
from checkflow.training import Training
from checkflow.units import format_bytes
from checkflow.unlisted import Unlisted, hook_line

_SHARE = 0.01  # of the time that looking may take
_FREE = 2  # looks, so that what changes each iteration is told before long
_NAMES: dict[type, str] = {
    torch.Generator: "torch.Generator",
    np.random.Generator: "numpy.random.Generator",
    np.random.RandomState: "numpy.random.RandomState",
    random.Random: "random.Random",
}
_GENERATORS = tuple(_NAMES)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A generator as it was. Who sets its `seed` anew makes its state from something else."""

    generator: object  # so that its identity stays its own
    seed: int
    state: bytes


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of a module as it was."""

    tensor: weakref.ref[torch.Tensor]
    storage: int
    version: int


class Forgotten:
    """Asked when an iteration begins, in the training's thread. What it finds is told once.

    Args:
        training: live.
        notify: told of generators, of loaders, of what communication hooks keep, and of networks where nothing can be
            recorded, in a line.
        found: told of networks that were written, and that an iteration which was recorded has only read; None where
            none is recorded, and networks are not looked at.
    """

    def __init__(
        self, training: Training, notify: Callable[[str], None], found: Callable[[tuple[Unlisted, ...]], None] | None
    ) -> None:
        self._training = training
        self._notify = notify
        self._found = found
        self._iterations, self._due, self._looks = 0, 2, 0
        self._began_s, self._spent_s = time.monotonic(), 0.0
        self._drawn: dict[int, _Drawn] = {}
        self._were: dict[int, _Written] = {}
        self._written: dict[int, Unlisted] = {}  # by storage: what was, between two looks
        self._constants: frozenset[int] = frozenset()
        self._is_blind = False
        self._told: dict[int, object] = {}  # generators, and storages
        self._loaders = Loaders(training, notify)
        models = (part for model in training.models for part in model.modules())
        self._hooks = _kept_by_hooks((("", each) for each in models), training)  # which attach tells of

    def begins(self, frame: FrameType) -> None:
        """An iteration does. Raises nothing but what `notify` and `found` do."""
        self._iterations += 1
        self._loaders.tell_moved()
        if self._iterations < self._due:
            return
        started_s = time.monotonic()
        if self._looks >= _FREE and self._spent_s > _SHARE * (started_s - self._began_s):
            return
        self._looks, self._due = self._looks + 1, 2 * self._iterations + 1  # odd, since epochs may have two
        drew: list[tuple[str, object]] = []
        hooks: dict[int, tuple[str, object]] = {}
        with contextlib.suppress(Exception):  # code of the user's objects runs when they are looked at
            kinds = (DistributedDataParallel if self._found is None else torch.nn.Module, *LOADERS, *_GENERATORS)
            reached = objects_from(self._training, frame, kinds).items()
            modules = [(path, each) for path, each in reached if isinstance(each, torch.nn.Module)]
            hooks = _kept_by_hooks(modules, self._training)
            if self._found is not None:
                self._look_at_modules(modules)
            drew = self._drew((path, each) for path, each in reached if isinstance(each, _GENERATORS))
            self._loaders.look((path, each) for path, each in reached if isinstance(each, LOADERS))
        self._spent_s += time.monotonic() - started_s
        for line in _lines_of_generators(drew):
            self._notify(line)
        for key in hooks.keys() - self._hooks.keys():
            self._notify(hook_line(*hooks[key]))
        self._hooks |= hooks
        self._tell_written()

    def recorded(self, constants: frozenset[int]) -> None:
        """An iteration was, which read these storages as it found them, and did not write them."""
        self._constants, self._is_blind = constants, False
        self._tell_written()

    def cannot_record(self) -> None:
        """Nobody knows what an iteration reads: what is written is told as such."""
        self._is_blind = True
        self._tell_written()

    def _drew(self, reached: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
        """Those that did since the last look, and were not told of."""
        known = set(map(_identity, (*objects_held(self._training, _GENERATORS), *_saved_anyway())))
        now: dict[int, _Drawn] = {}
        found: list[tuple[str, object]] = []
        for path, generator in reached:
            key = _identity(generator)
            if key in known or key in self._told:
                continue
            with contextlib.suppress(Exception):  # one that has no state, as the operating system's
                now[key] = _as_it_is(generator)
                before = self._drawn.get(key)
                if before is not None and before.seed == now[key].seed and before.state != now[key].state:
                    found.append((shown(path), generator))
                    self._told[key] = generator
        self._drawn = now
        return found

    def _look_at_modules(self, reached: Iterable[tuple[str, torch.nn.Module]]) -> None:
        held = storages_held(self._training, own=True)
        now: dict[int, _Written] = {}
        for path, tensor in _tensors_of(reached):
            with contextlib.suppress(RuntimeError):  # of inference_mode, which counts no writes
                storage = storage_id(tensor.untyped_storage())
                if storage in held:
                    continue
                (version,) = versions([tensor])
                now[id(tensor)] = _Written(weakref.ref(tensor), storage, version)
                before = self._were.get(id(tensor))
                was_there = before is not None and before.tensor() is tensor and before.storage == storage
                if was_there and before is not None and before.version != version:
                    self._written[storage] = Unlisted(path, tensor.numel() * tensor.element_size(), "")
        self._were = now
        alive = {each.storage for each in now.values()}
        self._written = {storage: one for storage, one in self._written.items() if storage in alive}

    def _tell_written(self) -> None:
        due = {
            storage: one
            for storage, one in self._written.items()
            if storage not in self._told and (self._is_blind or storage in self._constants)
        }
        if not due:
            return
        self._told |= due
        if self._found is not None and not self._is_blind:
            self._found(tuple(due.values()))
            return
        first, *others = due.values()
        more = f" and {len(others)} more" if others else ""
        size = format_bytes(sum(one.size_bytes for one in due.values()))
        self._notify(
            f"{first.name}{more} ({size}): written as training goes, and in no checkpoint; unless it is written anew "
            "before each use, list the module: attach(extra={...})"
        )


def _kept_by_hooks(reached: Iterable[tuple[str, torch.nn.Module]], training: Training) -> dict[int, tuple[str, object]]:
    """What communication hooks keep that is not listed, of DistributedDataParallel around what is trained."""
    trained = {id(parameter) for model in training.models for parameter in model.parameters()}
    return {
        id(state): (shown(path), state)
        for path, one in reached
        if isinstance(one, DistributedDataParallel) and any(id(each) in trained for each in one.parameters())
        for state in hook_states(one)
        if not training.listed.takes(state)
    }


def _tensors_of(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """What their state_dict would give that has a storage, by path."""
    for path, module in modules:
        kept = {name: each for name, each in own_buffers(module).items() if is_persistent(module, name)}
        for name, tensor in (own_parameters(module) | kept).items():
            if tensor is not None and has_storage(here := local(tensor)) and here.numel():
                yield shown(f"{path}.{name}"), here


def _saved_anyway() -> Iterator[object]:
    """The process's own generators, which each checkpoint has."""
    yield torch.default_generator
    yield from torch.cuda.default_generators
    for draw in (np.random.rand, random.random):
        yield getattr(draw, "__self__", None)


def _identity(generator: object) -> int:
    return generator_id(generator) if isinstance(generator, torch.Generator) else id(generator)


def _as_it_is(generator: object) -> _Drawn:
    if isinstance(generator, torch.Generator):
        return _Drawn(generator, generator.initial_seed(), bytes(generator.get_state().numpy()))
    if isinstance(generator, np.random.Generator):
        return _Drawn(generator, 0, pickle.dumps(generator.bit_generator.state))
    if isinstance(generator, np.random.RandomState):
        return _Drawn(generator, 0, pickle.dumps(generator.get_state()))
    assert isinstance(generator, random.Random)
    return _Drawn(generator, 0, pickle.dumps(generator.getstate()))


def _lines_of_generators(drew: Iterable[tuple[str, object]]) -> Iterator[str]:
    """One for each kind."""
    by_kind: dict[type, list[str]] = {}
    for name, generator in drew:
        by_kind.setdefault(next(each for each in _GENERATORS if isinstance(generator, each)), []).append(name)
    for kind, names in by_kind.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        argument = "generators" if kind is torch.Generator else "extra"
        how = f'give it: attach({argument}={{"{names[0].rpartition(".")[2]}": ...}})'
        yield (
            f"{names[0]}{more} ({_NAMES[kind]}): draws as training goes, and its state is in no checkpoint, so a "
            f"resumed run draws otherwise; {how}"
        )
