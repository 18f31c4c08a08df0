"""Names of state: which model or optimizer holds a tensor, and its path there. Nothing else cuts such a name.

A model's tensor has the path that state_dict gives it. An optimizer's has its parameter's path with the slot behind it,
"features.0.weight.exp_avg"; where two models in one optimizer have that path, the parameter's whole name stands there,
"model.1/features.0.weight.exp_avg".
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

found = TypeVar("found")


@dataclass(frozen=True, slots=True)
class StateName:
    """A name as graphs, schedules and checkpoints have it: "model.1/features.0.weight"."""

    holder: str  # "model" or "optimizer"; "model.1" of several
    path: str  # the tensor's name in the holder's file

    @classmethod
    def parse(cls, text: str) -> StateName:
        holder, _, path = text.partition("/")
        return cls(holder, path)

    def __str__(self) -> str:
        return f"{self.holder}/{self.path}"

    @property
    def is_optimizers(self) -> bool:
        return self.holder.partition(".")[0] == "optimizer"

    @property
    def is_extra(self) -> bool:
        """Whether the user listed it beside models and optimizers."""
        return self.holder.startswith("extra.")

    def above(self) -> Iterator[StateName]:
        """The names that this one is a part of, longest first: of its slot, of its parameter."""
        path = self.path
        while "." in path:
            path = path.rpartition(".")[0]
            yield StateName(self.holder, path)


def holders(kind: str, count: int) -> tuple[str, ...]:
    """("model",) for one, ("model.0", "model.1") for two."""
    return (kind,) if count == 1 else tuple(f"{kind}.{index}" for index in range(count))


def stems(holder: str, parameters: Iterable[str]) -> dict[str, StateName]:
    """Parameters of one optimizer, by name -> what the names of their slots begin with; no two are alike."""
    names = {text: StateName.parse(text) for text in parameters}
    count = Counter(name.path for name in names.values())
    return {text: StateName(holder, name.path if count[name.path] == 1 else text) for text, name in names.items()}


def owner(name: str, by_stem: Mapping[StateName, found]) -> found | None:
    """What is kept under the stem that the name of a slot begins with."""
    return next((by_stem[stem] for stem in StateName.parse(name).above() if stem in by_stem), None)


def nearest(name: str, names: Iterable[str]) -> str:
    """Up to three names that resemble it, for the end of a message; nothing where none does."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f" (nearest: {', '.join(close)})" if close else ""
