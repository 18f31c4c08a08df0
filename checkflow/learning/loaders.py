"""Passes over loaders that nobody attached and that go on from iteration to iteration: a resumed run begins others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from checkflow.data import ResumableLoader, begun_loaders
from checkflow.extra import Stateful
from checkflow.torch_internals import Loader, Pass, given_by, passes_over
from checkflow.trace.held import objects_held
from checkflow.trace.reachable import objects_in, shown
from checkflow.training import Training

LOADERS = (ResumableLoader, DataLoader)  # torchdata's and Accelerate's are of the second kind
_NAMELESS = "a loader that no name leads to"

_GIVE = "give it: attach(loader=...)"
_REPLACE = "give a checkflow.ResumableLoader or torchdata's StatefulDataLoader: attach(loader=...)"


@dataclass(frozen=True, slots=True)
class _Stood:
    """A pass as it was."""

    name: str  # of its loader
    kind: str
    advice: str
    went_on: Callable[[], bool]  # has given batches since


class Loaders:
    """Asked when an iteration begins, in the training's thread. Each loader is told of once.

    Args:
        training: live.
        notify: told in a line.
    """

    def __init__(self, training: Training, notify: Callable[[str], None]) -> None:
        self._training = training
        self._notify = notify
        self._stood: list[_Stood] = []
        self._told: set[str] = set()

    def look(self, reached: Iterable[tuple[str, object]]) -> None:
        """Note where passes are, so that `tell_moved` can be asked an iteration later. `reached`: LOADERS, by path."""
        held = {id(one) for one in objects_held(self._training, (*LOADERS, Sampler, IterableDataset))}
        held |= {id(one) for one in self._training.listed.objects.values()}
        named = [(shown(path), one) for path, one in reached]
        ours = {id(one): (_NAMELESS, one) for one in begun_loaders()}
        ours |= {id(one): (name, one) for name, one in named if isinstance(one, ResumableLoader)}
        held |= {id(one) for one in objects_in([("", [one for _, one in ours.values()])], (DataLoader,))}
        self._stood = [
            _Stood(name, type(one).__name__, _GIVE, _pass_of_ours(one))
            for name, one in ours.values()
            if id(one) not in held and name not in self._told
        ]
        apart = {
            name: one
            for name, one in named
            if isinstance(one, DataLoader)
            and name not in self._told
            and not any(id(part) in held for part in _parts(one))
        }
        found = passes_over(apart.values()) if apart else []
        by_loader = {id(one): name for name, one in apart.items()}
        self._stood += [
            _Stood(
                by_loader[id(one)],
                type(one).__name__,
                _GIVE if isinstance(one, Stateful) else _REPLACE,
                _pass_of_torchs(run),
            )
            for one, run in found
        ]

    def tell_moved(self) -> None:
        """Of passes that have given batches since they were noted."""
        stood, self._stood = self._stood, []
        moved = {each.name: each for each in stood if each.went_on()}
        self._told |= moved.keys()
        if moved:
            first, *others = moved.values()
            more = f" and {len(others)} more" if others else ""
            self._notify(
                f"{first.name}{more} ({first.kind}): its pass goes on as training does, and its position is in no "
                f"checkpoint, so a resumed run begins another; unless your loop finds its batch again, {first.advice}"
            )


def _pass_of_torchs(run: Pass) -> Callable[[], bool]:
    alive, given = weakref.ref(run), given_by(run)
    return lambda: (now := alive()) is not None and given_by(now) > given


def _pass_of_ours(loader: ResumableLoader[Any]) -> Callable[[], bool]:
    """Which the next `for` goes on with, so that it is asked where it stands: one that ended is in the next epoch."""
    alive, stood = weakref.ref(loader), _position(loader)

    def went_on() -> bool:
        now = alive()
        return now is not None and stood < _position(now) < (stood[0] + 1, 0)

    return went_on


def _position(loader: ResumableLoader[Any]) -> tuple[Any, Any]:
    state = loader.state_dict()
    return state["epoch"], state["items"]


def _parts(loader: Loader) -> Iterator[object]:
    """Whose state may be its position."""
    yield from (loader, loader.dataset, loader.sampler, loader.batch_sampler)
    yield getattr(loader.batch_sampler, "sampler", loader)
