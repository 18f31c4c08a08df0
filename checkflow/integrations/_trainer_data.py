"""The data that a Trainer goes over: in which pass it is and how far, and what each order is drawn with.

Trainer reckons the pass from the number of steps, and takes all steps for one pass where the data has no length. It
draws the order of a resumed pass with the generators as they are then. Here both are kept as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from checkflow.errors import InputError
from checkflow.integrations._drawn import Generators
from checkflow.state.host.samplers import check_drawn_again, generators_of

# Their samplers draw from torch's generators, or by the number of the pass.
_KNOWN = ("torch.", "torchdata.", "accelerate.", "transformers.")


class Passes:
    """Over the training data: the one that goes on, the steps that were made in it, and the states it began with."""

    def __init__(self, kept: Mapping[str, Any] | None) -> None:
        self._kept = kept  # of the checkpoint that is resumed; None also where its store is older than this
        self._resumes = kept is not None
        self._steps_of_pass: int | None = None  # None where the data has no length
        self._number = 0
        self._next = 0
        self._done = 0  # steps of the next that were made before
        self._first = 0  # global step that this one began after
        self._begun = ""
        self._loader: Any = None
        self._rng = Generators("train_dataloader", {})

    def follow(self, loader: Any, processes: int) -> None:
        """Training begins with it. Raises InputError for one that a resume has no position of."""
        iterable = isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
        if processes > 1 and type(loader).__name__ == "DataLoaderDispatcher" and not iterable:
            raise InputError(
                "dispatch_batches: gives all processes their batches from the first one, and the others have no "
                "position; leave it out of accelerator_config"
            )
        for sampler in () if iterable else _unknown_samplers(loader):
            check_drawn_again("train_dataloader", sampler)
        self._loader = loader
        self._rng = _generators("train_dataloader", loader)

    def position(
        self, reckoned: tuple[int, int], steps_of_pass: int | None, accumulated: int, *, skips: bool
    ) -> tuple[int, int]:
        """The passes that are done, and the batches of the next. `reckoned` is what Trainer makes of it."""
        kept, self._steps_of_pass = self._kept, steps_of_pass
        if kept is not None and kept["steps_of_pass"] == steps_of_pass:
            self._next, self._done, self._begun = kept["pass"], kept["steps"] if skips else 0, kept["begun"]
        else:  # other data, batches or processes
            self._next, self._done, self._begun = reckoned[0], reckoned[1] // accumulated, ""
        return self._next, self._done * accumulated

    def begin(self, step: int) -> None:
        """A pass does, or goes on, after this global step; its order is about to be drawn."""
        self._number, self._first = self._next, step - self._done
        self._next, self._done = self._next + 1, 0
        if self._begun and self._kept is not None:
            self._rng.set_host(self._begun)
        else:
            self._begun = self._rng.read()
        self._kept = None
        if self._resumes and self._number:
            _draw_no_seed(self._loader)

    def state(self, step: int) -> dict[str, object]:
        """Where it stands after this global step."""
        number, steps, begun = self._number, step - self._first, self._begun
        if steps == self._steps_of_pass:  # nothing is left of it
            number, steps, begun = number + 1, 0, self._rng.read()
        return {"pass": number, "steps": steps, "steps_of_pass": self._steps_of_pass, "begun": begun}


class Evaluations:
    """The loaders that Trainer evaluates with, of which it keeps those with persistent workers."""

    def __init__(self, kept: Mapping[str, str] | None) -> None:
        self._kept = kept or {}

    def state(self, loaders: Mapping[str, Any]) -> dict[str, str]:
        """By name: the states of their own generators, where they have some."""
        rngs = {name: _generators(name, loader) for name, loader in loaders.items()}
        return {name: rng.read() if rng.own else "" for name, rng in rngs.items()}

    def get(self, name: str, loaders: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """What `make` does. One that was there before the resume is made without a draw from everybody's generators."""
        if name in loaders or name not in self._kept:
            return make()
        everybodys = Generators(name, {})
        now = everybodys.read()
        loader = make()
        if self._kept[name]:
            _generators(name, loader).set(self._kept[name])
        everybodys.set(now)
        _draw_no_seed(loader)
        return loader


def _generators(name: str, loader: Any) -> Generators:
    """Those that its order, its workers' seeds and its data are drawn from, each once."""
    found: dict[str, Any] = {}
    for part in ("batch_sampler", "sampler"):
        found |= {f"{part}.{path}": one for path, one in generators_of(getattr(loader, part, None)).items()}
    found |= {"generator": getattr(loader, "generator", None)}
    found |= {"dataset.generator": getattr(getattr(loader, "dataset", None), "generator", None)}
    own: dict[str, torch.Generator] = {}
    for path, one in found.items():
        if isinstance(one, torch.Generator) and all(one is not other for other in own.values()):
            own[path] = one
    return Generators(name, own)


def _draw_no_seed(loader: Any) -> None:
    """Persistent workers were seeded when they were started, before the resume: new ones are beside all generators."""
    base = getattr(loader, "base_dataloader", loader)
    if getattr(base, "persistent_workers", False):
        base.generator = torch.Generator()
        base.generator.set_state(torch.get_rng_state())


def _unknown_samplers(loader: Any) -> Iterator[Any]:
    """The outermost of each chain of samplers that is the user's."""
    for part in ("batch_sampler", "sampler"):
        sampler = getattr(loader, part, None)
        while sampler is not None and _module(sampler).startswith(_KNOWN):
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if sampler is not None:
            yield sampler


def _module(sampler: Any) -> str:
    """Where its orders are made."""
    return getattr(getattr(type(sampler), "__iter__", None), "__module__", None) or ""
