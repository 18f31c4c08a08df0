"""Names of state: which model or optimizer holds a tensor, and its path there. Nothing else joins or cuts such a name.

A model's tensor has the path that state_dict gives it, `in_state_dict`. An optimizer's has its parameter's path with
the entry's name behind it, "features.0.weight.exp_avg"; where two models in one optimizer have that path, the
parameter's whole name stands there, "model.1/features.0.weight.exp_avg". What it keeps under a text, of no parameter,
has ".state.k": no parameter's path begins with a dot.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from checkflow.extra import key_of
from checkflow.torch_internals import CHECKPOINTED, COMPILED_FROM

_OWN = ".state."
_LEFT_OUT = re.compile(rf"(?<![^./]){CHECKPOINTED}(\.|$)")  # a whole part of a path, and the dot behind it
found = TypeVar("found")


class StateName(str):
    """A name as graphs, schedules and checkpoints have it: "model.1/features.0.weight".

    It is text, so that files and messages have it as it is; what it says of a tensor is asked here.
    """

    __slots__ = ()

    @classmethod
    def of(cls, holder: str, path: str) -> StateName:
        return cls(f"{holder}/{path}")

    @classmethod
    def of_group(cls, optimizer: str, index: int, key: str) -> StateName:
        """Of a tensor that a group of an optimizer holds, such as its learning rate."""
        return cls.of(optimizer, f"param_groups.{index}.{key}")

    @classmethod
    def of_own(cls, optimizer: str, key: str) -> StateName:
        """Of what an optimizer keeps in its state under a text, and not of a parameter."""
        return cls.of(optimizer, f"{_OWN}{key}")

    def inside(self, key: object) -> StateName:
        """Of what is kept there under this key: an optimizer's entry, where this is what a parameter's begin with."""
        return StateName(f"{self}.{key}")

    @property
    def holder(self) -> str:
        """ "model" or "optimizer"; "model.1" of several; "extra.ema" of what was listed beside them."""
        return self.partition("/")[0]

    @property
    def path(self) -> str:
        """The tensor's name in the holder's file."""
        return self.partition("/")[2]

    @property
    def is_optimizers(self) -> bool:
        return is_of_kind(self.holder, "optimizer")

    @property
    def is_own(self) -> bool:
        """Whether an optimizer keeps it under a text, and not of a parameter."""
        return self.path.startswith(_OWN) and self.is_optimizers

    @property
    def listed_as(self) -> str | None:
        """The key in `extra` under which the user listed its holder; None for a model or optimizer."""
        return key_of(self.holder)

    @property
    def is_extra(self) -> bool:
        """Whether the user listed it beside models and optimizers."""
        return self.listed_as is not None

    def above(self) -> Iterator[StateName]:
        """The names that this one is a part of, longest first: of its entry, of its parameter."""
        path = self.path
        while "." in path:
            path = path.rpartition(".")[0]
            yield StateName.of(self.holder, path)

    def is_inside(self, other: StateName) -> bool:
        """Whether it is of something that is kept there."""
        return self.startswith(f"{other}.")


def subject_of(holder: str, path: str) -> str:
    """Of an anchor: a module or parameter there, "model/features.0", a function, "optimizer/_foreach_mul_"; or all."""
    return f"{holder}/{path}" if path else holder


def parent_of(subject: str) -> str:
    """The subject of the module that has this one; "" of a model."""
    holder, slash, path = subject.partition("/")
    return subject_of(holder, path.rpartition(".")[0]) if slash else ""


def unwrap(name: str) -> str:
    """A name or subject, of a model that was traced within torch.compile's wrapper, without the wrapper."""
    return name.replace(f"/{COMPILED_FROM}.", "/")


def in_state_dict(path: str) -> str:
    """A path or name as state_dict has it: wrappers for activation checkpointing leave themselves out of theirs."""
    if CHECKPOINTED not in path or path.startswith(_OWN) or f"/{_OWN}" in path:
        return path
    found = _LEFT_OUT.sub("", path)
    return found[:-1] if found != path and found.endswith((".", "/")) else found


def holders(kind: str, count: int) -> tuple[str, ...]:
    """("model",) for one, ("model.0", "model.1") for two."""
    return (kind,) if count == 1 else tuple(f"{kind}.{index}" for index in range(count))


def is_of_kind(holder: str, kind: str) -> bool:
    """Whether it is one of those that `holders` names: "model.1" is of the kind "model"."""
    return holder.partition(".")[0] == kind


def gradient_name(back: int, parameter: str) -> StateName:
    """Of a parameter's gradient that an update consumed so many iterations before the checkpoint's."""
    return StateName.of(f"gradient.{back}", parameter)


def file_of(holder: str) -> str:
    """The file of its tensors: "model" -> "model.safetensors"."""
    return f"{holder}.safetensors"


def holder_of(file: str) -> str:
    """The inverse."""
    return file.removesuffix(".safetensors")


def stems(holder: str, parameters: Iterable[StateName]) -> dict[StateName, StateName]:
    """Parameters of one optimizer -> what the names of their entries begin with; no two are alike."""
    paths = {name: name.path for name in parameters}
    count = Counter(paths.values())
    return {name: StateName.of(holder, path if count[path] == 1 else name) for name, path in paths.items()}


def owner(name: StateName, by_stem: Mapping[StateName, found]) -> found | None:
    """What is kept under the stem that the name of a entry begins with."""
    return next((by_stem[stem] for stem in name.above() if stem in by_stem), None)


def nearest(name: str, names: Iterable[str]) -> str:
    """Up to three names that resemble it, for the end of a message; nothing where none does."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f" (nearest: {', '.join(close)})" if close else ""
