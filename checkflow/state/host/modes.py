"""Which modules are in training mode, and which in evaluation. The script says it; a checkpoint only notes it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter

import torch

from checkflow.state.holders import modules_of, parts_of, unwrapped
from checkflow.state.names import StateName, parent_of, subject_of
from checkflow.torch_internals import own_modules
from checkflow.training import Training

_is_training = attrgetter("training")


def modes_of(training: Training) -> dict[str, bool]:
    """Whether each module is in training mode, by subject: "model", "model/features.0"."""
    return {
        subject_of(holder, path): module.training
        for holder, model in modules_of(training).items()
        for path, module in parts_of(unwrapped(model))
    }


def noted(modes: Mapping[str, bool]) -> dict[str, bool]:
    """Those of models, and of modules whose mode is not their parent's. Of a model that is in evaluation as a whole
    nothing: an evaluation has left it so, and its modules' modes in training are not known."""
    trained = {StateName(subject).holder for subject, is_training in modes.items() if is_training}
    return {
        subject: is_training
        for subject, is_training in modes.items()
        if StateName(subject).holder in trained and is_training is not modes.get(parent_of(subject))
    }


def mode_in(found: Mapping[str, bool], subject: str) -> bool | None:
    """A module's mode, of what was noted: its own, or the nearest one's above it. None where that is not known."""
    while subject and subject not in found:
        subject = parent_of(subject)
    return found.get(subject)


class ModeReader:
    """Reads the modes at each checkpoint; what is noted is made anew only where one is otherwise than before."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._modules: list[torch.nn.Module] = []
        self._within: list[dict[str, torch.nn.Module | None]] = []  # of each
        self._children: list[torch.nn.Module | None] = []  # of all of them
        self._modes: list[bool] = []
        self._noted: dict[str, bool] = {}

    def read(self) -> dict[str, bool]:
        """What is noted of the modes now; the same object where nothing changed."""
        is_known = bool(self._modules) and self._children == self._children_now()
        if not is_known:
            self._modules = [
                each for model in modules_of(self._training).values() for each in unwrapped(model).modules()
            ]
            self._within = list(map(own_modules, self._modules))
            self._children = self._children_now()
        modes = list(map(_is_training, self._modules))
        if not is_known or modes != self._modes:
            self._modes, self._noted = modes, noted(modes_of(self._training))
        return self._noted

    def _children_now(self) -> list[torch.nn.Module | None]:
        return list(chain.from_iterable(each.values() for each in self._within))
