"""Passes over loaders that nobody attached and that go on from iteration to iteration: a resumed run begins others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.utils.data import DataLoader, IterableDataset, Sampler

from checkflow.extra import Stateful
from checkflow.torch_internals import Loader, Pass, given_by, passes_over
from checkflow.trace.held import objects_held
from checkflow.trace.reachable import shown
from checkflow.training import Training

_GIVE = "give it: attach(loader=...)"
_REPLACE = "give a checkflow.ResumableLoader or torchdata's StatefulDataLoader: attach(loader=...)"


@dataclass(frozen=True, slots=True)
class _Stood:
    """A pass as it was."""

    name: str  # of its loader
    advice: str
    run: weakref.ref[Pass]
    given: int  # batches


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

    def look(self, reached: Iterable[tuple[str, Loader]]) -> None:
        """Note where passes are, so that `tell_moved` can be asked an iteration later. `reached`: by path."""
        held = {id(one) for one in objects_held(self._training, (DataLoader, Sampler, IterableDataset))}
        held |= {id(one) for one in self._training.listed.objects.values()}
        named = ((shown(path), one) for path, one in reached if not any(id(part) in held for part in _parts(one)))
        apart = {name: one for name, one in named if name not in self._told}
        found = passes_over(apart.values()) if apart else []
        by_loader = {id(one): name for name, one in apart.items()}
        self._stood = [
            _Stood(
                by_loader[id(one)], _GIVE if isinstance(one, Stateful) else _REPLACE, weakref.ref(run), given_by(run)
            )
            for one, run in found
        ]

    def tell_moved(self) -> None:
        """Of passes that have given batches since they were noted."""
        stood, self._stood = self._stood, []
        moved = {each.name: each.advice for each in stood if (run := each.run()) and given_by(run) > each.given}
        self._told |= moved.keys()
        if moved:
            name, *others = moved
            more = f" and {len(others)} more" if others else ""
            self._notify(
                f"{name}{more} (DataLoader): its pass goes on as training does, and its position is in no checkpoint, "
                f"so a resumed run begins another; unless your loop finds its batch again, {moved[name]}"
            )


def _parts(loader: Loader) -> Iterator[object]:
    """Whose state may be its position."""
    yield from (loader, loader.dataset, loader.sampler, loader.batch_sampler)
    yield getattr(loader.batch_sampler, "sampler", loader)
